"""Blocks on their way between a GPU's memory and the host's, pinned and on streams of their own, beside steps."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from common.engine.device_cache import DeviceKVCache, Staging
from common.ids import BlockId
from common.kv_layout import HeadChecksums, head_checksums
from tests.gpu.workers import decode_runner
from tests.model import harness

pytestmark = pytest.mark.gpu

NUM_BLOCKS = 32
NUM_STEPS = 200
PROMPTS = [[1, 2, 3], list(range(5, 45)), [7] * 17]


@pytest.fixture
def runner_cache(model: Path) -> tuple[harness.Executor, DeviceKVCache]:
    runner = decode_runner(model, "triton")
    cache = runner.kv_cache
    assert isinstance(cache, DeviceKVCache)
    return runner, cache


def fill(cache: DeviceKVCache, block_ids: list[BlockId]) -> None:
    """With random values."""
    generator = torch.Generator().manual_seed(3)
    shape = (len(block_ids), *cache.blocks.shape[1:])
    cache.blocks[block_ids] = torch.randn(shape, generator=generator).to(cache.blocks)


def copy_and_verify(
    source: Staging, target: Staging, block_ids: list[BlockId], wanted: dict[BlockId, HeadChecksums]
) -> None:
    """Out of one cache, through the host, into the first blocks of the other: as the transfer does, in its thread."""
    pieces = source.read(block_ids, source.heads)
    arrivals = target.arrivals([BlockId(block) for block in range(len(block_ids))], target.heads)
    for place, piece in zip(arrivals.pieces, pieces, strict=True):
        place[:] = piece
    found = [head_checksums(piece, target.head_bytes) for piece in arrivals.pieces]
    assert found == [wanted[block_id] for block_id in block_ids]
    arrivals.keep(range(len(block_ids)))


def repeat_until(is_over: Callable[[], bool], act: Callable[[], None]) -> int:
    """At least once; how often."""
    count = 0
    while not count or not is_over():
        act()
        count += 1
    return count


def test_blocks_are_copied_beside_steps_and_neither_disturbs_the_other(
    runner_cache: tuple[harness.Executor, DeviceKVCache], device: torch.device
) -> None:
    runner, cache = runner_cache
    wanted = harness.greedy(runner, PROMPTS, NUM_STEPS)
    # The driver takes blocks from both ends: those in the middle are nobody's.
    middle = cache.num_blocks // 2
    block_ids = [BlockId(block) for block in reversed(range(middle, middle + NUM_BLOCKS))]
    fill(cache, block_ids)
    checksums = cache.checksums(block_ids)
    target = DeviceKVCache(cache.layout, 2 * NUM_BLOCKS, device, cache.ops)
    heads = range(cache.layout.num_kv_heads)
    ends = cache.shard_memory(heads), target.shard_memory(heads)
    with ThreadPoolExecutor(1) as threads:
        steps = threads.submit(harness.greedy, runner, PROMPTS, NUM_STEPS)
        num_copies = repeat_until(steps.done, lambda: copy_and_verify(*ends, block_ids, checksums))
        assert steps.result() == wanted
    assert num_copies > 1, "copies went on beside the steps"
    assert torch.equal(target.blocks[:NUM_BLOCKS], cache.blocks[block_ids])
    assert not target.blocks[NUM_BLOCKS:].any()


def test_some_heads_of_blocks_go_where_they_should(
    runner_cache: tuple[harness.Executor, DeviceKVCache], device: torch.device
) -> None:
    _, cache = runner_cache
    block_ids = [BlockId(block) for block in (9, 2, 30)]
    fill(cache, block_ids)
    target = DeviceKVCache(cache.layout, NUM_BLOCKS, device, cache.ops)
    last = cache.layout.num_kv_heads - 1
    whole, some = range(last + 1), range(last, last + 1)
    arrivals = target.shard_memory(whole).arrivals(block_ids, some)
    for place, piece in zip(arrivals.pieces, cache.shard_memory(whole).read(block_ids, some), strict=True):
        place[:] = piece
    arrivals.keep([0, 2])
    expected = torch.zeros_like(target.blocks)
    expected[[9, 30], last:] = cache.blocks[[9, 30], last:]
    assert torch.equal(target.blocks, expected)


def test_room_for_copies_is_pinned(runner_cache: tuple[harness.Executor, DeviceKVCache]) -> None:
    _, cache = runner_cache
    assert cache.shard_memory(range(1)).allocate(4, range(1)).is_pinned()
