"""Prompts that waited long are held back until others end with them; nobody else is."""

from common.ids import RequestId, SequenceKey
from prefill.patience import PATIENCE, hold_until_s, patient_until_s
from prefill.scheduler import PrefillFailed
from tests.unit.test_prefill_scheduler import Bench, tokens

STEP_S = 0.001
"""What the runner says that a step of 16 tokens takes."""


def queue_of(num_prompts: int, hold_share: float = 0.5, max_tokens: int = 5, attempt: int = 0) -> Bench:
    """Prompts of 16 tokens, a step each, behind one that was computed and tells how fast the runner is."""
    bench = Bench(num_blocks=32, hold_share=hold_share)
    bench.add("first", tokens(16))
    bench.step()
    for index in range(num_prompts):
        bench.now = 0.0
        bench.add(str(index), tokens(16, first=100 * (index + 1)), max_tokens, attempt)
    bench.now = 0.0
    return bench


def endings(bench: Bench, num_steps: int) -> list[list[str]]:
    """Which prompts end in each of some steps."""
    ended: list[list[str]] = []
    for _ in range(num_steps):
        _, events = bench.step()
        assert not any(isinstance(event, PrefillFailed) for event in events)
        ended.append([event.sequence.key.request_id for event in events])
        bench.now += STEP_S
    return ended


def test_prompts_that_waited_long_end_together() -> None:
    bench = queue_of(3)
    bench.now += 60
    assert endings(bench, 3) == [[], [], ["0", "1", "2"]]


def test_a_prompt_is_held_no_longer_than_a_share_of_what_it_waited() -> None:
    bench = queue_of(3)
    bench.now += (PATIENCE + 3) * STEP_S  # half of what is beyond its patience is enough for one more, not for two
    assert endings(bench, 4) == [[], ["0", "1"], ["2"], []]


def test_nobody_is_held_who_waited_no_longer_than_it_bears() -> None:
    assert endings(queue_of(3), 3) == [["0"], ["1"], ["2"]]
    bench = queue_of(3)
    bench.now += PATIENCE * STEP_S
    assert endings(bench, 1) == [["0"]]


def test_without_a_share_nobody_is_held() -> None:
    bench = queue_of(3, hold_share=0)
    bench.now += 60
    assert endings(bench, 3) == [["0"], ["1"], ["2"]]


def test_the_last_in_the_queue_is_held_for_nobody() -> None:
    bench = queue_of(1)
    bench.now += 60
    assert endings(bench, 1) == [["0"]]


def test_a_stream_that_is_resumed_is_not_held() -> None:
    bench = queue_of(2, attempt=1)
    bench.now += 60
    assert endings(bench, 2) == [["0"], ["1"]]


def test_a_prompt_that_ends_with_its_first_token_is_not_held() -> None:
    bench = queue_of(2, max_tokens=1)
    bench.now += 60
    assert endings(bench, 2) == [["0"], ["1"]]


def test_a_prompt_that_is_held_ends_at_once_when_the_next_one_is_given_up() -> None:
    bench = queue_of(2)
    bench.now += 60
    assert endings(bench, 1) == [[]]
    bench.scheduler.cancel(SequenceKey(RequestId("1"), 0))
    assert endings(bench, 1) == [["0"]]


def test_a_prompt_that_is_held_ends_when_the_next_one_takes_longer_than_was_thought() -> None:
    bench = Bench(num_blocks=32, hold_share=0.5)
    bench.add("first", tokens(16))
    bench.step()
    bench.add("held", tokens(16, first=100))
    bench.add("long", tokens(64, first=200))
    bench.now += 60
    assert endings(bench, 2) == [[], []]
    bench.now += 31  # it waited for 60 s
    assert endings(bench, 1) == [["held"]]
    assert ["long"] in endings(bench, 4)


def test_a_hold_is_a_share_of_the_wait_that_was_too_long_when_the_prompt_could_have_ended() -> None:
    assert hold_until_s(patient_until_s=10, held_since_s=14, hold_share=0.5) == 16
    assert hold_until_s(patient_until_s=15, held_since_s=14, hold_share=0.5) == 14


def test_a_prompt_bears_some_times_its_own_work_and_nothing_where_that_is_not_known() -> None:
    assert patient_until_s(arrival_s=3, num_tokens=200, tokens_per_s=100) == 3 + PATIENCE * 2
    assert patient_until_s(arrival_s=3, num_tokens=200, tokens_per_s=0) == 3
