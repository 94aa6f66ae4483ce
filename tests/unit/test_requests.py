"""The life of requests in a gateway, by stories."""

from dataclasses import replace

import pytest

from common.ids import PeerId, RequestId
from common.sampling import Finish, FinishReason
from common.service import LinkFull, LinkLost, Received, Tick
from common.wire import (
    Cancel,
    DecodeRequest,
    Ended,
    EndReason,
    PrefillRequest,
    Role,
    Tokens,
)
from gateway.fleet import NO_MATCH
from gateway.requests import Abort, Submit
from tests.fakes import expected_tokens, fake_layout
from tests.unit.requests_rig import (
    D0,
    D1,
    GREEDY,
    P0,
    P1,
    POLICY,
    PROMPT,
    Bench,
    Client,
    prefill_done,
    started,
    status,
    tokens,
)


def test_tokens_come_out_in_order_and_once() -> None:
    bench = started()
    client = bench.submit()
    bench.prefill()
    peer, request = bench.decode()
    for index, count in ((1, 1), (1, 2), (2, 3), (4, 2)):
        bench.do(Received(peer, Tokens(entries=(tokens(request, index, count),))))
    assert client.token_ids == expected_tokens(PROMPT, GREEDY)
    assert client.finish == Finish(FinishReason.LENGTH)
    assert len(bench.requests) == 0


def started_with_both() -> Bench:
    bench = Bench()
    bench.join((P0, Role.BOTH), (P1, Role.BOTH))
    return bench


def test_a_worker_that_does_both_goes_on_without_being_asked() -> None:
    bench = started_with_both()
    client = bench.submit()
    peer, request = bench.take(PrefillRequest)
    assert isinstance(request, PrefillRequest)
    bench.do(Received(peer, prefill_done(request, peer, Role.BOTH)))
    assert bench.sent == []
    bench.do(Received(peer, Tokens(entries=(tokens(request, 1, 5),))))
    assert client.token_ids == expected_tokens(PROMPT, GREEDY)
    assert client.finish == Finish(FinishReason.LENGTH)


def test_a_stream_of_a_worker_that_does_both_goes_on_elsewhere_when_it_dies() -> None:
    bench = started_with_both()
    client = bench.submit()
    peer, request = bench.take(PrefillRequest)
    assert isinstance(request, PrefillRequest)
    bench.do(Received(peer, prefill_done(request, peer, Role.BOTH)))
    bench.do(LinkLost(peer, "gone"))
    other, retry = bench.take(PrefillRequest)
    assert isinstance(retry, PrefillRequest)
    assert (other != peer, retry.attempt, list(retry.output_token_ids)) == (True, 1, client.token_ids)


def test_only_a_worker_that_does_both_may_hand_over_nothing() -> None:
    bench = started()
    bench.submit()
    peer, request = bench.take(PrefillRequest)
    assert isinstance(request, PrefillRequest)
    bench.do(Received(peer, prefill_done(request, peer, Role.BOTH)))
    assert bench.take(Cancel) == (peer, Cancel(request_id=RequestId("a"), attempt=0))


def test_a_gap_in_the_tokens_starts_the_next_attempt() -> None:
    bench = started()
    client = bench.submit()
    bench.prefill()
    peer, request = bench.decode()
    bench.do(Received(peer, Tokens(entries=(tokens(request, 2, 1),))))
    assert bench.take(Cancel) == (D0, Cancel(request_id=RequestId("a"), attempt=0))
    _, retry = bench.take(PrefillRequest)
    assert isinstance(retry, PrefillRequest)
    assert (retry.attempt, list(retry.output_token_ids)) == (1, client.token_ids)


def test_what_comes_for_another_attempt_is_answered_with_a_cancel() -> None:
    bench = started()
    client = bench.submit()
    bench.prefill()
    peer, request = bench.decode()
    stale = replace(tokens(request, 1, 1), attempt=7)
    bench.do(Received(peer, Tokens(entries=(stale,))))
    assert bench.take(Cancel) == (D0, Cancel(request_id=RequestId("a"), attempt=7))
    assert len(client.token_ids) == 1


def test_a_resumed_request_prefers_the_worker_that_computed_its_prompt() -> None:
    bench = Bench()
    bench.join((P0, Role.PREFILL), (P1, Role.PREFILL), (D0, Role.DECODE), (D1, Role.DECODE))
    bench.submit()
    first, request = bench.take(PrefillRequest)
    assert isinstance(request, PrefillRequest)
    bench.do(Received(first, prefill_done(request, first)))
    peer, _ = bench.decode()
    bench.do(LinkLost(peer, "broken"))
    again, _ = bench.take(PrefillRequest)
    assert again == first


def test_a_request_that_workers_die_of_is_given_up() -> None:
    bench = Bench()
    client = Client()
    bench.clients[RequestId("a")] = client
    bench.join((D0, Role.DECODE))
    bench.do(Submit(RequestId("a"), PROMPT, GREEDY))
    for incarnation in range(3):
        peer = PeerId(f"p#{incarnation}")
        bench.join((peer, Role.PREFILL))
        bench.do(LinkLost(peer, "broken"))
    assert client.error is not None
    assert client.error.status == 500


def test_workers_that_die_in_one_incident_count_once() -> None:
    """All are dead, but the gateway learns of it one by one, and sends the request on to the next one each time."""
    bench = Bench()
    others = [PeerId(f"p{number}#1") for number in range(1, 6)]
    bench.join((P0, Role.PREFILL), (D0, Role.DECODE), *((peer, Role.PREFILL) for peer in others))
    bench.now = 1.0
    bench.join((D1, Role.DECODE))
    client = bench.submit()
    bench.prefill()
    running, request = bench.decode()
    bench.do(Received(running, Tokens(entries=(tokens(request, 1, 1),))))
    for number, peer in enumerate([running, P0, *others, D0, D1]):
        bench.now = 2.0 + number / 1000
        bench.do(LinkLost(peer, "broken"))
    assert client.error is None
    bench.now += POLICY.resume_timeout_s - 1
    bench.do(Tick())
    bench.join((PeerId("p0#2"), Role.PREFILL), (PeerId("d0#2"), Role.DECODE))
    bench.sent = bench.sent[-1:]
    bench.prefill()
    peer, request = bench.decode()
    bench.do(Received(peer, Tokens(entries=(tokens(request, 3, 3),))))
    assert client.token_ids == client.expected


def test_a_request_that_kills_at_once_is_given_up_although_workers_had_no_time_to_say_anything() -> None:
    bench = Bench()
    peers = [PeerId(f"p{number}#0") for number in range(3)]
    bench.join((D0, Role.DECODE), *((peer, Role.PREFILL) for peer in peers))
    bench.now = 1.0
    client = bench.submit()
    num_deaths = 0
    while client.error is None:
        bench.now += 0.01
        killed, _ = bench.take(PrefillRequest)
        bench.do(LinkLost(killed, "broken"))
        num_deaths += 1
        if num_deaths % len(peers) == 0:
            bench.now += 1.0
            bench.join((D0, Role.DECODE), *((PeerId(f"{peer}{num_deaths}"), Role.PREFILL) for peer in peers))
    assert client.error.code == "too_many_attempts"
    assert num_deaths <= POLICY.max_attempts * len(peers) + 1


def test_preemptions_and_drains_do_not_count_as_failures() -> None:
    bench = started()
    client = bench.submit()
    for attempt in range(10):
        bench.prefill()
        peer, _ = bench.decode()
        if client.is_ended:
            break
        reason = EndReason.PREEMPTED if attempt % 2 else EndReason.DRAINING
        bench.do(Received(peer, Ended(request_id=RequestId("a"), attempt=attempt, reason=reason, detail="")))
        bench.join((D0, Role.DECODE))
        if len(client.token_ids) == GREEDY.max_tokens - 1:
            bench.prefill()
            break
    assert client.token_ids == expected_tokens(PROMPT, GREEDY)


@pytest.mark.parametrize("reason", [EndReason.TOO_LARGE, EndReason.REFUSED])
def test_what_no_worker_can_compute_is_the_client_s_error_and_not_tried_again(reason: EndReason) -> None:
    bench = started()
    client = bench.submit()
    detail = "the model has 10 tokens, got token id 10"
    bench.do(Received(P0, Ended(request_id=RequestId("a"), attempt=0, reason=reason, detail=detail)))
    assert client.error is not None
    assert (client.error.status, client.error.message) == (400, detail)


@pytest.mark.parametrize("reason", [EndReason.TOO_LARGE, EndReason.REFUSED, EndReason.FAILED])
def test_a_bad_request_does_not_count_against_its_worker(reason: EndReason) -> None:
    """However many come, the worker is asked as before, and what others have there goes on."""
    bench = started()
    good = bench.submit("good")
    for number in range(100):
        bad = bench.submit(f"bad{number}")
        bench.do(Received(P0, Ended(request_id=RequestId(f"bad{number}"), attempt=0, reason=reason, detail="")))
        assert bad.error is not None
    assert [worker.peer for worker in bench.requests.fleet.prompt_workers()] == [P0]
    assert bench.requests.totals == {"retries": 0, "stale_messages": 0}
    bench.prefill()
    assert (good.error, len(good.token_ids)) == (None, 1)
    bench.sent.clear()
    bench.submit("next")
    assert bench.take(PrefillRequest)[0] == P0


def rejecting() -> Bench:
    return Bench(replace(POLICY, when_no_prefill="reject"))


def test_a_new_request_is_rejected_at_once_without_a_prefill_worker_if_so_wanted() -> None:
    bench = rejecting()
    bench.join((D0, Role.DECODE))
    client = bench.submit()
    assert client.error is not None
    assert (client.error.status, client.error.message) == (503, "no live prefill worker")
    assert client.error.retry_after_s
    bench.join((P0, Role.PREFILL))
    assert bench.submit("b").error is None


def test_what_was_not_begun_is_rejected_with_the_last_prefill_worker() -> None:
    bench = rejecting()
    bench.join((P0, Role.PREFILL), (D0, Role.DECODE))
    client = bench.submit()
    bench.do(LinkLost(P0, "broken"))
    assert client.error is not None
    assert client.error.status == 503
    assert len(bench.requests) == 0


def test_a_stream_that_has_begun_waits_for_a_prefill_worker_whatever_happens_to_new_ones() -> None:
    bench = rejecting()
    bench.join((P0, Role.PREFILL), (D0, Role.DECODE))
    client = bench.submit()
    bench.prefill()
    bench.do(LinkLost(P0, "broken"))
    bench.do(LinkLost(D0, "broken"))
    bench.now += POLICY.resume_timeout_s - 0.1
    bench.do(Tick())
    assert client.error is None
    bench.now += 0.2
    bench.do(Tick())
    assert client.error is not None
    assert f"{POLICY.resume_timeout_s:g} s" in client.error.message


def test_a_missing_decode_worker_is_waited_for_in_any_case() -> None:
    bench = rejecting()
    bench.join((P0, Role.PREFILL))
    assert bench.submit().error is None


def test_a_queued_request_is_sent_with_the_first_status_of_a_worker() -> None:
    bench = Bench()
    bench.join((D0, Role.DECODE))
    bench.submit()
    bench.join((P0, Role.PREFILL))
    assert bench.take(PrefillRequest)[0] == P0


def test_without_a_decode_worker_no_prompt_is_started_and_the_answer_is_503() -> None:
    bench = Bench()
    bench.join((P0, Role.PREFILL))
    client = bench.submit()
    assert bench.sent == []
    for second in range(1, 8):
        bench.now = float(second)
        bench.join((P0, Role.PREFILL))
        bench.do(Tick())
    assert client.error is not None
    assert client.error.status == 503
    assert "decode" in client.error.message


def test_a_request_that_takes_too_long_is_cancelled_at_its_worker() -> None:
    bench = started()
    client = bench.submit()
    for second in range(62):
        bench.now = float(second)
        bench.join((P0, Role.PREFILL), (D0, Role.DECODE))
        bench.do(Tick())
    assert client.error is not None
    assert client.error.status == 504
    assert bench.take(Cancel) == (P0, Cancel(request_id=RequestId("a"), attempt=0))


def test_a_worker_that_refuses_because_it_drains_is_not_asked_again() -> None:
    bench = Bench()
    bench.join((P0, Role.PREFILL), (P1, Role.PREFILL), (D0, Role.DECODE))
    bench.submit()
    peer, _ = bench.take(PrefillRequest)
    bench.do(Received(peer, Ended(request_id=RequestId("a"), attempt=0, reason=EndReason.DRAINING, detail="")))
    other, _ = bench.take(PrefillRequest)
    assert other != peer
    bench.join((peer, Role.PREFILL))
    assert len(bench.requests.fleet.prompt_workers()) == 2, "what its next status says is what counts"


def test_a_handoff_that_is_announced_twice_stays_wanted() -> None:
    bench = started()
    client = bench.submit()
    peer, request = bench.take(PrefillRequest)
    assert isinstance(request, PrefillRequest)
    for _ in range(2):
        bench.do(Received(peer, prefill_done(request, peer)))
    assert not any(isinstance(message, Cancel) for _, message in bench.sent)
    assert bench.requests.leases(P0) == ((RequestId("a"), 0),)
    assert len(client.token_ids) == 1


def test_an_abort_cancels_at_both_workers() -> None:
    bench = started()
    bench.submit()
    bench.prefill()
    bench.decode()
    bench.do(Abort(RequestId("a")))
    assert {bench.take(Cancel)[0], bench.take(Cancel)[0]} == {P0, D0}
    assert bench.do(Abort(RequestId("a"))) == []


def test_a_full_link_sends_the_request_elsewhere() -> None:
    bench = Bench()
    bench.join((P0, Role.PREFILL), (P1, Role.PREFILL), (D0, Role.DECODE))
    bench.submit()
    peer, message = bench.take(PrefillRequest)
    bench.do(LinkFull(peer, message))
    other, _ = bench.take(PrefillRequest)
    assert other != peer


def test_kv_goes_only_to_a_worker_with_the_same_layout() -> None:
    bench = started()
    bench.submit()
    bench.do(LinkLost(D0, "broken"))
    bench.do(Received(D0, status(D0, Role.DECODE, layout=fake_layout(block_size=8))))
    bench.prefill()
    assert not any(isinstance(message, DecodeRequest) for _, message in bench.sent)
    bench.join((D1, Role.DECODE))
    assert bench.decode()[0] == D1


def test_a_prompt_whose_kv_no_decode_worker_takes_is_not_started_and_the_answer_is_503() -> None:
    bench = Bench()
    other = Received(D0, status(D0, Role.DECODE, layout=fake_layout(block_size=8)))
    bench.join((P0, Role.PREFILL))
    bench.do(other)
    client = bench.submit()
    for second in range(1, 8):
        bench.now = float(second)
        bench.join((P0, Role.PREFILL))
        bench.do(other)
        bench.do(Tick())
    assert bench.sent == []
    assert client.error is not None
    assert (client.error.status, client.token_ids) == (503, [])
    assert f"no live {NO_MATCH} worker" in client.error.message


def test_prompts_go_to_the_prefill_workers_whose_kv_a_decode_worker_takes() -> None:
    bench = Bench()
    bench.do(Received(P0, status(P0, Role.PREFILL, layout=fake_layout(block_size=8))))
    bench.join((P1, Role.PREFILL), (D0, Role.DECODE))
    for name in "abc":
        bench.submit(name)
    assert [peer for peer, _ in bench.sent] == [P1] * 3
