"""What a worker does that computes prompts and decodes in one cache: who goes first, and what waits for what."""

from dataclasses import replace

from aggregated.service import AggregatedService
from common.engine.block_manager import BlockManager
from common.engine.step import StepPlan, StepResult
from common.engine.worker import WorkerIdentity
from common.ids import RequestId, SequenceKey
from common.sampling import FinishReason, SamplingParams
from common.service import LinkFull, LinkLost, Received, Send, Tick
from common.wire import Cancel, Control, Ended, EndReason, PrefillDone, PrefillRequest, Role, Tokens
from decode.scheduler import DecodeScheduler
from decode.service import DecodeService
from prefill.scheduler import PrefillScheduler
from prefill.service import PrefillService
from tests.fakes import MAX_MODEL_LEN, VOCAB_SIZE, FakeRunner, expected_tokens
from tests.unit.test_decode_scheduler import request as decode_request
from tests.unit.test_worker_services import GATEWAY, LAYOUT


class Both:
    """The service with a fake runner, and all that it said."""

    def __init__(self, num_blocks: int = 16, max_batch_tokens: int = 64, max_num_seqs: int = 8) -> None:
        self.blocks = BlockManager(num_blocks, LAYOUT.block_size)
        self.runner = FakeRunner(num_blocks, LAYOUT)
        self.said: list[Control] = []
        identity = WorkerIdentity("both", "tcp://both:1", LAYOUT, num_blocks, VOCAB_SIZE, MAX_MODEL_LEN)
        prompts = PrefillScheduler(self.blocks, max_batch_tokens=max_batch_tokens, max_step_s=0)
        self.service = AggregatedService(
            PrefillService(identity, None, self.blocks, prompts),
            DecodeService(identity, self.blocks, DecodeScheduler(self.blocks, max_num_seqs=max_num_seqs)),
            max_num_seqs=max_num_seqs,
        )

    def hear(self, event: Received | LinkFull | LinkLost | Tick) -> list[Control]:
        return self._note(self.service.handle(event, 0.0))

    def ask(self, name: str, length: int, max_tokens: int = 5, *, attempt: int = 0, age_s: float = 0) -> list[Control]:
        return self.hear(Received(GATEWAY, prompt(name, length, max_tokens, attempt=attempt, age_s=age_s)))

    def plan(self) -> StepPlan | None:
        plan, effects = self.service.plan(0.0)
        self._note(effects)
        return plan

    def complete(self, plan: StepPlan) -> list[Control]:
        return self._note(self.service.complete(plan, self.runner.execute(plan), 0.0))

    def step(self) -> list[Control]:
        """What it says after a step; nothing when there is nothing to compute."""
        plan = self.plan()
        return self.complete(plan) if plan else []

    def steps(self, count: int) -> list[dict[str, int]]:
        """Tokens that each of the next steps computes, by request."""
        plans: list[dict[str, int]] = []
        for _ in range(count):
            plan = self.plan()
            plans.append(planned(plan))
            if plan:
                self.complete(plan)
        return plans

    def _note(self, effects: list[Send]) -> list[Control]:
        messages = [effect.message for effect in effects]
        self.said += messages
        return messages


def prompt(name: str, length: int, max_tokens: int = 5, *, attempt: int = 0, age_s: float = 0) -> PrefillRequest:
    return PrefillRequest(
        request_id=RequestId(name),
        attempt=attempt,
        prompt_token_ids=tuple(ord(name) * 100 + index for index in range(length)),
        output_token_ids=(),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0),
        age_s=age_s,
    )


def output_of(name: str, said: list[Control]) -> list[int]:
    """The tokens of a request, in the order in which its gateway hears of them."""
    token_ids: list[int] = []
    for message in said:
        if isinstance(message, PrefillDone) and message.request_id == name:
            assert message.index == len(token_ids)
            token_ids.append(message.token_id)
        for entry in message.entries if isinstance(message, Tokens) else ():
            if entry.request_id == name:
                assert entry.index == len(token_ids)
                token_ids += entry.token_ids
    return token_ids


def planned(plan: StepPlan | None) -> dict[str, int]:
    """Tokens by request."""
    return {sequence.key.request_id: len(sequence.token_ids) for sequence in plan.sequences} if plan else {}


def ended(messages: list[Control]) -> list[EndReason]:
    return [message.reason for message in messages if isinstance(message, Ended)]


def test_a_prompt_goes_on_in_the_next_step_in_the_blocks_that_it_has() -> None:
    both = Both()
    both.ask("a", length=6)
    (done,) = both.step()
    assert isinstance(done, PrefillDone)
    assert (done.kv, done.finish_reason, both.blocks.num_owned) == (None, None, 2)
    for _ in range(4):
        both.step()
    request = prompt("a", 6)
    assert output_of("a", both.said) == expected_tokens(request.prompt_token_ids, request.sampling)
    assert both.blocks.num_owned == 0
    assert both.service.is_drained


def test_a_request_of_one_token_ends_with_its_prompt() -> None:
    both = Both()
    both.ask("a", length=6, max_tokens=1)
    (done,) = both.step()
    assert isinstance(done, PrefillDone)
    assert done.finish_reason is FinishReason.LENGTH
    assert both.plan() is None
    assert both.blocks.num_owned == 0


def test_chunks_of_a_prompt_are_computed_beside_tokens() -> None:
    both = Both(num_blocks=32, max_batch_tokens=16)
    both.ask("a", length=6, max_tokens=20)
    both.step()
    both.ask("b", length=40)
    assert both.steps(4) == [{"a": 1, "b": 16}, {"a": 1, "b": 16}, {"a": 1, "b": 8}, {"a": 1, "b": 1}]
    counters = both.service.status(0.0).counters
    assert (counters["steps"], counters["prompt_tokens_computed"], counters["output_tokens_computed"]) == (5, 46, 5)


def test_a_step_takes_no_more_sequences_than_it_may() -> None:
    both = Both(num_blocks=64, max_num_seqs=3)
    for name in "abcde":
        both.ask(name, length=6)
    both.step()
    assert planned(both.plan()) == {"a": 1, "b": 1, "c": 1}


def test_the_youngest_is_preempted_and_no_prompt_takes_its_blocks() -> None:
    both = Both(num_blocks=5)
    both.ask("a", length=8, max_tokens=9, age_s=2)
    both.ask("b", length=8, max_tokens=9, age_s=1)
    both.step()
    both.ask("c", length=3)
    assert planned(both.plan()) == {"a": 1}
    assert ended(both.said) == [EndReason.PREEMPTED]
    both.ask("b", length=8, max_tokens=9, attempt=1, age_s=1)
    assert planned(both.plan()) == {"a": 1}, "b is the first in the queue, and does not fit; c does not overtake it"


def test_the_only_sequence_waits_for_a_prompt_that_holds_the_block_it_needs() -> None:
    both = Both(num_blocks=8, max_batch_tokens=2)
    both.ask("a", length=4, max_tokens=13, age_s=1)
    both.steps(2)
    both.ask("b", length=20, max_tokens=4)
    assert both.steps(8) == [{"a": 1, "b": 2}] * 8
    assert both.steps(2) == [{"b": 2}] * 2
    assert both.steps(1) == [{"a": 1}]
    assert ended(both.said) == [EndReason.PREEMPTED]


def test_tokens_wait_for_a_first_token_that_a_full_link_did_not_take() -> None:
    both = Both()
    both.ask("a", length=6)
    (done,) = both.step()
    both.said.clear()
    both.hear(LinkFull(GATEWAY, done))
    assert both.step() == both.step() == []
    assert not both.service.is_drained
    assert both.hear(Tick()) == [done]
    (tokens,) = both.hear(Tick())
    assert isinstance(tokens, Tokens)
    assert [(entry.index, len(entry.token_ids)) for entry in tokens.entries] == [(1, 2)]


def test_tokens_that_a_full_link_did_not_take_are_sent_later_though_no_status_was_heard() -> None:
    both = Both()
    both.ask("a", length=6)
    both.step()
    (tokens,) = both.step()
    assert both.hear(LinkFull(GATEWAY, tokens)) == []
    assert both.hear(Tick()) == [tokens]


def test_a_newer_attempt_replaces_one_that_is_decoded() -> None:
    both = Both()
    both.ask("a", length=6)
    both.step()
    assert both.ask("a", length=6) == [], "this very attempt is here already"
    assert planned(both.plan()) == {"a": 1}
    both.ask("a", length=6, attempt=1)
    assert both.blocks.num_owned == 0
    plan = both.plan()
    assert plan is not None
    assert [sequence.key for sequence in plan.sequences] == [SequenceKey(RequestId("a"), 1)]


def test_a_cancel_and_a_lost_link_free_both_halves() -> None:
    for event in (Received(GATEWAY, Cancel(request_id=RequestId("a"), attempt=0)), LinkLost(GATEWAY, "gone")):
        for num_steps in (0, 1, 3):
            both = Both(max_batch_tokens=4)
            both.ask("a", length=8)
            for _ in range(num_steps):
                both.step()
            told = ended(both.hear(event))
            assert told == ([EndReason.LINK_LOST] if isinstance(event, LinkLost) else [])
            assert both.blocks.num_owned == 0
            assert both.service.is_drained


def test_what_could_not_be_decoded_to_its_end_is_refused_before_it_is_computed() -> None:
    both = Both(num_blocks=4)
    assert ended(both.ask("a", length=10, max_tokens=7)) == [EndReason.TOO_LARGE]
    assert ended(both.ask("b", length=10, max_tokens=6)) == []


def test_kv_of_others_is_refused() -> None:
    both = Both()
    message = decode_request("a", num_prompt=6, max_tokens=4)
    assert ended(both.hear(Received(GATEWAY, message))) == [EndReason.TRANSFER]
    assert both.service.is_drained


def test_a_step_that_breaks_ends_what_is_in_it() -> None:
    both = Both(max_batch_tokens=8)
    both.ask("a", length=6)
    both.step()
    both.ask("b", length=12)
    plan = both.plan()
    assert plan is not None
    failed = {sequence.key: "it broke" for sequence in plan.sequences}
    effects = both.service.complete(plan, StepResult(sampled={}, failed=failed), 0.0)
    assert ended([effect.message for effect in effects]) == [EndReason.FAILED] * 2
    assert both.service.status(0.0).counters["sequences_failed"] == 2
    assert both.blocks.num_owned == 0


def test_draining_finishes_what_has_begun_and_leaving_gives_up_the_rest() -> None:
    both = Both(num_blocks=8, max_batch_tokens=8)
    both.ask("a", length=6)
    both.step()
    both.ask("b", length=12)
    both.step()
    both.ask("c", length=12)
    told = [effect.message for effect in both.service.drain()]
    assert ended(told) == [EndReason.DRAINING]
    assert ended(both.ask("d", length=3)) == [EndReason.DRAINING]
    both.step()
    assert planned(both.plan()) == {"a": 1, "b": 1}, "a prompt that had begun is decoded here"
    told = [effect.message for effect in both.service.abandon()]
    assert ended(told) == [EndReason.DRAINING] * 2
    assert both.service.is_drained
    assert both.blocks.num_owned == 0


def test_its_status_is_of_both_halves() -> None:
    both = Both(max_batch_tokens=8)
    both.ask("a", length=6)
    both.step()
    both.ask("b", length=12)
    both.step()
    status = both.service.status(0.0)
    assert (status.role, status.num_running, status.num_waiting_tokens) == (Role.BOTH, 2, 4)
    assert replace(status, counters={}) == replace(both.service.status(1.0), counters={})
    assert status.counters["owned_blocks"] == status.num_blocks - status.num_free_blocks
