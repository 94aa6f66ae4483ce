"""What a decode worker does when requests come twice, gateways go, blocks run out, and it is told to leave."""

from dataclasses import replace

from common.engine.step import StepResult
from common.engine.worker import GATEWAY_TIMEOUT_S
from common.ids import RequestId, SequenceKey
from common.sampling import FinishReason
from common.service import LinkFull, LinkLost, Received, Send, Tick
from common.wire import Cancel, DecodeRequest, Ended, EndReason, Tokens
from kvtransfer.transport import AbortPull, PullFinished, SendRelease, StartPull
from tests.unit.test_decode_scheduler import SOURCE, request
from tests.unit.test_worker_services import GATEWAY, KEY, STATUS, Decode, ended_reason


def admit(decode: Decode, message: DecodeRequest) -> SequenceKey:
    """Ask for it, and let its pull begin."""
    assert decode.ask(message) == []
    decode.service.plan(0.0)
    return SequenceKey(message.request_id, message.attempt)


def run(decode: Decode, message: DecodeRequest) -> SequenceKey:
    key = admit(decode, message)
    decode.service.handle(PullFinished(key, "", 1), 0.0)
    return key


def step(decode: Decode, failing: SequenceKey | None = None) -> list[object]:
    """Every sequence gets a token that is its index."""
    plan, before = decode.service.plan(0.0)
    if plan is None:
        return [*before]
    sampled = {s.key: len(s.output_token_ids) for s in plan.sequences if s.key != failing}
    result = StepResult(sampled=sampled, failed={} if failing is None else {failing: "not finite"})
    return [*before, *decode.service.complete(plan, result, 0.0)]


def tokens(effects: list[object]) -> Tokens:
    (message,) = (e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Tokens))
    return message


def reasons(effects: list[object]) -> list[EndReason]:
    return [e.message.reason for e in effects if isinstance(e, Send) and isinstance(e.message, Ended)]


def test_tokens_of_all_sequences_come_in_one_message_until_their_end() -> None:
    decode = Decode()
    run(decode, request("a", num_prompt=6, max_tokens=3))
    run(decode, request("b", num_prompt=6, max_tokens=9, first=100))
    entries = [*tokens(step(decode)).entries, *tokens(step(decode)).entries]
    assert [(e.request_id, e.index) for e in entries] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert [e.finish_reason for e in entries if e.request_id == "a"] == [None, FinishReason.LENGTH]
    assert [e.request_id for e in tokens(step(decode)).entries] == ["b"]


def test_a_prompt_whose_blocks_are_all_here_is_released_without_a_pull() -> None:
    decode = Decode()
    run(decode, request("a", num_prompt=8, max_tokens=4))
    again = request("b", num_prompt=8, max_tokens=4)
    decode.ask(again)
    _, effects = decode.service.plan(0.0)
    assert effects == [SendRelease(SequenceKey(again.request_id, 0), SOURCE)]


def test_a_request_that_comes_twice_is_pulled_once() -> None:
    decode = Decode()
    message = request("a", num_prompt=6, max_tokens=4)
    admit(decode, message)
    assert decode.ask(message) == []
    assert decode.service.plan(0.0) == (None, [])


def test_a_request_that_comes_again_after_its_end_starts_anew_although_its_tokens_are_unsent() -> None:
    decode = Decode()
    message = request("a", num_prompt=6, max_tokens=3)
    run(decode, message)
    for _ in range(2):
        decode.service.handle(LinkFull(GATEWAY, tokens(step(decode))), 0.0)
    run(decode, message)
    (entry,) = tokens(step(decode)).entries
    assert (entry.index, entry.token_ids, entry.finish_reason) == (1, (1,), None)


def test_a_cancel_that_overtakes_its_request_wins() -> None:
    decode = Decode()
    decode.service.handle(Received(GATEWAY, Cancel(request_id=KEY.request_id, attempt=1)), 0.0)
    for attempt in range(2):
        assert decode.ask(request("a", num_prompt=6, max_tokens=4, attempt=attempt)) == []
    assert decode.service.is_drained
    decode.ask(request("a", num_prompt=6, max_tokens=4, attempt=2))
    assert not decode.service.is_drained


def test_a_newer_attempt_aborts_the_pull_of_the_older_one() -> None:
    decode = Decode()
    admit(decode, request("a", num_prompt=6, max_tokens=4))
    assert decode.ask(request("a", num_prompt=6, max_tokens=4, attempt=1)) == [AbortPull(KEY)]
    _, (start,) = decode.service.plan(0.0)
    assert isinstance(start, StartPull)
    assert start.key.attempt == 1
    assert decode.service.handle(PullFinished(KEY, "aborted", 0), 0.0) == []


def test_a_request_that_could_outgrow_the_cache_is_refused() -> None:
    decode = Decode(num_blocks=4)
    (refusal,) = decode.ask(request("a", num_prompt=9, max_tokens=8))
    assert ended_reason(refusal) is EndReason.TOO_LARGE
    assert decode.ask(request("b", num_prompt=8, max_tokens=8)) == []


def test_a_request_without_a_token_is_refused() -> None:
    (refusal,) = Decode().ask(replace(request("a", num_prompt=6, max_tokens=4), output_token_ids=()))
    assert ended_reason(refusal) is EndReason.TRANSFER


def test_a_sequence_that_is_preempted_is_reported() -> None:
    decode = Decode(num_blocks=5)
    run(decode, request("old", num_prompt=7, max_tokens=10))
    run(decode, request("young", num_prompt=7, max_tokens=10, first=100))
    effects = [effect for _ in range(9) for effect in step(decode)]
    assert reasons(effects) == [EndReason.PREEMPTED]
    assert decode.service.status(0.0).counters["preemptions"] == 1
    assert decode.service.is_drained


def test_a_sequence_that_breaks_the_step_is_reported_behind_the_tokens_of_the_others() -> None:
    decode = Decode()
    bad = run(decode, request("bad", num_prompt=6, max_tokens=9))
    run(decode, request("good", num_prompt=6, max_tokens=9, first=100))
    effects = step(decode, failing=bad)
    assert [entry.request_id for entry in tokens(effects).entries] == ["good"]
    assert reasons(effects) == [EndReason.FAILED]


def test_a_lost_link_aborts_pulls_and_drops_tokens_that_are_unsent() -> None:
    decode = Decode()
    run(decode, request("a", num_prompt=6, max_tokens=9))
    decode.service.handle(LinkFull(GATEWAY, tokens(step(decode))), 0.0)
    pulling = admit(decode, request("b", num_prompt=6, max_tokens=9, first=100))
    effects = decode.service.handle(LinkLost(GATEWAY, "gap"), 0.0)
    assert AbortPull(pulling) in effects
    assert reasons([*effects]) == [EndReason.LINK_LOST] * 2
    assert decode.service.handle(Tick(), 0.1) == []
    assert decode.service.handle(LinkLost(GATEWAY, "gap"), 0.1) == [], "each is given up once"
    decode.service.handle(PullFinished(pulling, "aborted", 0), 0.2)
    assert decode.service.is_drained


def test_a_gateway_that_is_silent_for_too_long_is_gone() -> None:
    decode = Decode()
    run(decode, request("a", num_prompt=6, max_tokens=9))
    decode.service.handle(Received(GATEWAY, STATUS), 1.0)
    assert decode.service.handle(Tick(), GATEWAY_TIMEOUT_S + 0.5) == []
    effects = decode.service.handle(Tick(), GATEWAY_TIMEOUT_S + 1.5)
    assert reasons([*effects]) == [EndReason.LINK_LOST]
    assert decode.blocks.num_owned == 0


def test_draining_goes_on_with_what_is_pulled_or_runs() -> None:
    decode = Decode(num_blocks=8)
    run(decode, request("running", num_prompt=7, max_tokens=3))
    pulling = admit(decode, request("pulling", num_prompt=7, max_tokens=3, first=100))
    decode.ask(request("waiting", num_prompt=20, max_tokens=3, first=200))
    assert reasons([*decode.service.drain()]) == [EndReason.DRAINING]
    assert reasons(decode.ask(request("new", num_prompt=6, max_tokens=4))) == [EndReason.DRAINING]
    decode.service.handle(PullFinished(pulling, "", 1), 0.0)
    entries = [entry for _ in range(2) for entry in tokens(step(decode)).entries]
    assert {entry.request_id for entry in entries if entry.finish_reason} == {"running", "pulling"}
    assert decode.service.is_drained


def test_leaving_gives_up_everything_but_waits_for_the_ends_of_pulls() -> None:
    decode = Decode()
    run(decode, request("running", num_prompt=6, max_tokens=9))
    pulling = admit(decode, request("pulling", num_prompt=6, max_tokens=9, first=100))
    cancelled = admit(decode, request("cancelled", num_prompt=6, max_tokens=9, first=200))
    decode.service.handle(Received(GATEWAY, Cancel(request_id=RequestId("cancelled"), attempt=0)), 0.0)
    effects = decode.service.abandon()
    assert reasons([*effects]) == [EndReason.DRAINING] * 2
    assert AbortPull(pulling) in effects
    assert AbortPull(cancelled) not in effects
    for key in (pulling, cancelled):
        assert not decode.service.is_drained
        decode.service.handle(PullFinished(key, "aborted", 0), 0.0)
    assert decode.service.is_drained
