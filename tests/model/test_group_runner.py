"""Rank 0's runner: every rank takes part in every step, and what breaks a step breaks the group."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from common.engine.group_runner import GroupRunner
from common.engine.parallel import Shard
from common.engine.rank_channel import Claim, Entry, Rest, Sealed, Step
from common.engine.runner import ModelRunner
from common.engine.step import ScheduledSequence, StepPlan, StepResult
from common.engine.worker_group import WorkerGroup
from common.errors import BatonError, GroupFailed
from common.ids import BlockId, RequestId, SequenceKey
from kernels.group import GroupBroken

KEY = SequenceKey(RequestId("r"), 0)


class FakeGroup:
    """Notes what is logged; answers with what it was given."""

    def __init__(self, size: int, answers: Sequence[Sealed] = ()) -> None:
        self.size = size
        self.logged: list[Entry] = []
        self.reason = "rank 1 is gone"
        self._answers = list(answers)

    def log(self, entry: Entry) -> None:
        self.logged.append(entry)

    def collect(self, kind: type[Sealed]) -> list[Sealed]:
        return self._answers

    def break_up(self, reason: str) -> None:
        self.reason = reason

    def failure(self) -> BatonError:
        return GroupFailed(self.reason)


class FakeRunner:
    """Seals with the checksums it was given, or raises."""

    def __init__(self, outcome: dict[BlockId, tuple[int, ...]] | Exception) -> None:
        self._outcome = outcome

    def execute(self, plan: StepPlan) -> StepResult:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return StepResult(sampled={KEY: 5}, checksums=self._outcome)

    def claim_cores(self) -> None:
        pass

    def rest(self) -> None:
        pass


def make_runner(group: FakeGroup, own: FakeRunner, kv_heads: Sequence[range]) -> GroupRunner:
    shards = [
        Shard(rank, len(kv_heads), range(1), heads, range(1), range(1), (1,)) for rank, heads in enumerate(kv_heads)
    ]
    return GroupRunner(cast(ModelRunner, own), cast(WorkerGroup, cast(Any, group)), shards)


def plan_of(*seal: int) -> StepPlan:
    sequence = ScheduledSequence(
        key=KEY,
        token_ids=[1],
        start=0,
        block_table=[BlockId(0)],
        sampling=None,
        prompt_token_ids=[1],
        output_token_ids=[],
        seal=[BlockId(block) for block in seal],
    )
    return StepPlan((sequence,))


def test_checksums_of_all_ranks_are_put_together_by_heads() -> None:
    group = FakeGroup(2, [Sealed([(13,), (23,)])])
    runner = make_runner(group, FakeRunner({BlockId(7): (11, 12), BlockId(8): (21, 22)}), [range(2), range(2, 3)])
    result = runner.execute(plan_of(7, 8))
    assert result.checksums == {7: (11, 12, 13), 8: (21, 22, 23)}
    assert result.sampled == {KEY: 5}
    assert [type(entry) for entry in group.logged] == [Step]


def test_of_ranks_that_have_the_same_head_the_first_one_s_checksum_counts() -> None:
    group = FakeGroup(3, [Sealed([(99,)]), Sealed([(12,)])])
    runner = make_runner(group, FakeRunner({BlockId(7): (11,)}), [range(1), range(1), range(1, 2)])
    assert runner.execute(plan_of(7)).checksums == {7: (11, 12)}


def test_rest_is_told_once() -> None:
    group = FakeGroup(2)
    runner = make_runner(group, FakeRunner({}), [range(1), range(1, 2)])
    runner.rest()
    runner.rest()
    runner.execute(plan_of())
    runner.rest()
    assert [type(entry) for entry in group.logged] == [Rest, Step, Rest]


def test_cores_that_were_claimed_are_given_back_by_all_ranks_if_no_step_follows() -> None:
    group = FakeGroup(2)
    runner = make_runner(group, FakeRunner({}), [range(1), range(1, 2)])
    for call in (runner.rest, runner.claim_cores, runner.rest):
        call()
    assert [type(entry) for entry in group.logged] == [Rest, Claim, Rest]


def test_a_step_that_fails_at_rank_0_breaks_the_group() -> None:
    group = FakeGroup(2)
    runner = make_runner(group, FakeRunner(ValueError("no")), [range(1), range(1, 2)])
    with pytest.raises(GroupFailed, match="rank 0 of 2: the step failed: no"):
        runner.execute(plan_of())


def test_a_step_that_another_rank_breaks_fails_for_that_rank_s_reason() -> None:
    group = FakeGroup(2)
    runner = make_runner(group, FakeRunner(GroupBroken("aborted")), [range(1), range(1, 2)])
    with pytest.raises(GroupFailed, match="rank 1 is gone"):
        runner.execute(plan_of())
