"""Which heads come from which shard, when the sender's heads are split otherwise than the receiver's. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from common.kv_source import KVShard


@dataclass(frozen=True, slots=True)
class ShardPull:
    """Neighbouring heads of the model that are pulled from one shard."""

    shard: KVShard
    heads: range


def plan_pulls(shards: Sequence[KVShard], heads: range) -> tuple[ShardPull, ...]:
    """Take each head once, from the first shard that has it: checksums are of that one's bytes.

    shards: have every one of the heads
    """

    def holder(head: int) -> int:
        return next(index for index, shard in enumerate(shards) if head in shard.heads)

    runs = [(index, list(run)) for index, run in groupby(heads, holder)]
    return tuple(ShardPull(shards[index], range(run[0], run[-1] + 1)) for index, run in runs)
