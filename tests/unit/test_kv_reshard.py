"""Blocks between groups whose ranks have heads in any split: every byte arrives once, where it belongs."""

import random
from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.ids import PeerId
from common.kv_source import KVShard
from common.shard_memory import ShardMemory
from kvtransfer.reshard import ShardPull, plan_pulls

HEAD_BYTES = 6
NUM_BLOCKS = 3


def shard(rank: int, heads: range) -> KVShard:
    return KVShard(
        peer=PeerId(f"prefill#1/{rank}"),
        data_address=f"tcp://prefill:{rank + 1}",
        shm_name="",
        shm_nonce="",
        first_head=heads.start,
        num_heads=len(heads),
    )


@st.composite
def splits(draw: st.DrawFn, num_heads: int) -> list[range]:
    """Which heads each rank has: all of them, cut anywhere, some ranks with what others have, in any order."""
    cuts = sorted(draw(st.sets(st.integers(1, num_heads - 1)))) if num_heads > 1 else []
    ranges = [range(*each) for each in zip([0, *cuts], [*cuts, num_heads], strict=True)]
    for _ in range(draw(st.integers(0, 3))):
        first = draw(st.integers(0, num_heads - 1))
        ranges.append(range(first, draw(st.integers(first + 1, num_heads))))
    return draw(st.permutations(ranges))


def memory_of(heads: range, blocks: list[list[bytes]]) -> ShardMemory:
    """A cache with these heads of blocks, each given as all its heads."""
    data = b"".join(block[head] for block in blocks for head in heads)
    return ShardMemory(memoryview(bytearray(data)), heads, HEAD_BYTES)


@given(st.data())
def test_every_head_of_every_block_arrives_once_at_each_rank_that_needs_it(data: st.DataObject) -> None:
    num_heads = data.draw(st.integers(1, 9))
    senders, receivers = data.draw(splits(num_heads)), data.draw(splits(num_heads))
    rng = random.Random(data.draw(st.integers(0, 9)))
    blocks = [[rng.randbytes(HEAD_BYTES) for _ in range(num_heads)] for _ in range(NUM_BLOCKS)]
    shards = [shard(rank, heads) for rank, heads in enumerate(senders)]
    caches = {each.peer: memory_of(each.heads, blocks) for each in shards}
    empty = [[bytes(HEAD_BYTES)] * num_heads] * NUM_BLOCKS
    for heads in receivers:
        received = memory_of(heads, empty)
        arrivals: Counter[int] = Counter()
        for part in plan_pulls(shards, heads):
            arrivals.update(part.heads)
            for block_id in range(NUM_BLOCKS):
                piece = caches[part.shard.peer].piece(block_id, part.heads)
                assert len(piece) == len(part.heads) * HEAD_BYTES
                received.piece(NUM_BLOCKS - 1 - block_id, part.heads)[:] = piece
        assert arrivals == Counter(heads)
        assert bytes(received.memory) == bytes(memory_of(heads, blocks[::-1]).memory)


@given(st.data())
def test_each_head_comes_from_the_first_shard_that_has_it_and_neighbours_together(data: st.DataObject) -> None:
    num_heads = data.draw(st.integers(1, 9))
    shards = [shard(rank, heads) for rank, heads in enumerate(data.draw(splits(num_heads)))]
    parts = plan_pulls(shards, range(num_heads))
    for part in parts:
        for head in part.heads:
            assert part.shard == next(each for each in shards if head in each.heads)
    assert all(one.shard != other.shard for one, other in pairwise(parts))


def test_equal_groups_pull_from_one_shard_each() -> None:
    shards = [shard(0, range(2)), shard(1, range(2, 4))]
    assert plan_pulls(shards, range(2, 4)) == (ShardPull(shards[1], range(2, 4)),)


def test_ranks_that_share_a_head_all_pull_it_from_its_first_shard() -> None:
    shards = [shard(0, range(1)), shard(1, range(1)), shard(2, range(1, 2)), shard(3, range(1, 2))]
    assert plan_pulls(shards, range(2)) == (ShardPull(shards[0], range(1)), ShardPull(shards[2], range(1, 2)))
