"""Runs step plans on all ranks of a worker group: rank 0's side."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from common.engine.parallel import Shard
from common.engine.rank_channel import Claim, Rest, Sealed, to_step
from common.engine.runner import ModelRunner
from common.engine.step import StepPlan, StepResult
from common.engine.worker_group import WorkerGroup
from common.ids import BlockId
from common.kv_layout import HeadChecksums
from kernels.group import GroupBroken


class GroupRunner:
    """As `ModelRunner`; every other rank computes its part of each plan at the same time."""

    def __init__(self, runner: ModelRunner, group: WorkerGroup, shards: Sequence[Shard]) -> None:
        """runner: of our own part;  shards: of all ranks."""
        self._runner = runner
        self._group = group
        self._homes = find_homes(shards)
        self._is_resting = False

    def execute(self, plan: StepPlan) -> StepResult:
        """Raises: GroupFailed, when all ranks have to go: they are not at the same place any more."""
        self.announce(plan)
        try:
            result = self._runner.execute(plan)
        except GroupBroken as error:
            raise self._group.failure() from error
        except Exception as error:
            # The others may wait for us in the middle of this step.
            self._group.break_up(f"rank 0 of {self._group.size}: the step failed: {error}")
            raise self._group.failure() from error
        return replace(result, checksums=self._merge(plan, result.checksums))

    def announce(self, plan: StepPlan) -> None:
        """Have the others begin a step, in which we are to take our part. Raises: GroupFailed."""
        self._is_resting = False
        self._group.log(to_step(plan))

    def _merge(self, plan: StepPlan, own: Mapping[BlockId, HeadChecksums]) -> dict[BlockId, HeadChecksums]:
        sealed = [block_id for sequence in plan.sequences for block_id in sequence.seal]
        if not sealed:
            return {}
        ranks = [[own[block_id] for block_id in sealed], *(reply.checksums for reply in self._group.collect(Sealed))]
        return {
            block_id: tuple(ranks[rank][index][head] for rank, head in self._homes)
            for index, block_id in enumerate(sealed)
        }

    def allow_binding(self) -> None:
        """Ours; the other ranks see to theirs."""
        self._runner.allow_binding()

    def claim_cores(self) -> None:
        self._is_resting = False
        self._group.log(Claim())
        self._runner.claim_cores()

    def rest(self) -> None:
        if not self._is_resting:
            self._is_resting = True
            self._group.log(Rest())
        self._runner.rest()

    def others_want_cores(self) -> bool:
        return self._runner.others_want_cores()

    def counters(self) -> dict[str, float]:
        return {**self._runner.counters(), "ranks": float(self._group.size)}


def find_homes(shards: Sequence[Shard]) -> list[tuple[int, int]]:
    """Of each KV head the first rank that has it, whose checksum is the one that counts, and its place at that rank."""
    homes: dict[int, tuple[int, int]] = {}
    for shard in shards:
        for place, head in enumerate(shard.kv_heads):
            homes.setdefault(head, (shard.rank, place))
    return [homes[head] for head in range(len(homes))]
