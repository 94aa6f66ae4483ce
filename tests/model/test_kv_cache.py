"""The cache's layout in bytes, over memory of its own and over a buffer that somebody else shares."""

import mmap
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
import torch
import xxhash

from common.engine.kv_cache import TORCH_DTYPES, KVCache
from common.ids import BlockId
from common.kv_layout import DTYPE_BYTES, KVLayout

SHAPE = (5, 2, 3, 2, 4, 8)
"""[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]"""


def make_layout(dtype: str = "float32") -> KVLayout:
    return KVLayout(
        name="head-words", dtype=dtype, num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, model_hash="hash"
    )


def make_cache(buffer: mmap.mmap | memoryview | None = None) -> KVCache:
    return KVCache(make_layout(), SHAPE[0], buffer)


def test_a_block_is_one_piece_head_after_head_with_all_their_layers() -> None:
    cache = make_cache()
    expected = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    for index in range(SHAPE[2]):
        layer = cache.layers[index]
        for part, values in ((layer.keys, expected[:, :, index, 0]), (layer.values, expected[:, :, index, 1])):
            part.copy_(torch.from_numpy(values).view(part.shape))
    assert np.array_equal(np.frombuffer(cache.memory, np.float32).reshape(SHAPE), expected)
    for block in range(SHAPE[0]):
        got = np.frombuffer(cache.block_view(BlockId(block)), np.float32).reshape(SHAPE[1:])
        assert np.array_equal(got, expected[block])


def test_bytes_written_to_a_block_are_what_layers_read() -> None:
    cache = make_cache()
    block = np.random.default_rng(1).random(SHAPE[1:], dtype=np.float32)
    cache.block_view(BlockId(3))[:] = block.tobytes()
    for index in range(SHAPE[2]):
        layer = cache.layers[index]
        for part, values in ((layer.keys, block[:, index, 0]), (layer.values, block[:, index, 1])):
            assert np.array_equal(part[3].numpy().ravel(), values.ravel())
            assert part[[0, 1, 2, 4]].count_nonzero() == 0


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_the_layouts_block_bytes_are_the_caches(dtype: str) -> None:
    layout = make_layout(dtype)
    cache = KVCache(layout, 5)
    assert len(cache.memory) == 5 * layout.block_bytes
    assert cache.layers[0].dtype == TORCH_DTYPES[dtype]
    pair = {4: 1, 2: 2}[DTYPE_BYTES[dtype]]
    assert cache.layers[0].keys.shape == (5, 2, 8 // pair, 4, pair)
    assert cache.layers[0].values.shape == (5, 2, 4 // pair, 8, pair)


def test_the_cache_starts_zeroed() -> None:
    assert not any(make_cache().memory)


def test_a_buffer_larger_than_the_cache_is_used_from_its_start() -> None:
    num_bytes = SHAPE[0] * make_layout().block_bytes
    buffer = mmap.mmap(-1, num_bytes + 100)
    cache = make_cache(buffer)
    assert len(cache.memory) == num_bytes
    cache.layers[2].values[4, 1, 3, 7] = 1.5
    assert np.frombuffer(buffer, np.float32, count=1, offset=num_bytes - 4) == 1.5
    assert not any(buffer[num_bytes:])


def test_what_is_written_to_shared_memory_is_seen_through_another_mapping() -> None:
    num_bytes = SHAPE[0] * make_layout().block_bytes
    ours = SharedMemory(create=True, size=num_bytes)
    theirs = SharedMemory(name=ours.name)
    assert ours.buf is not None
    assert theirs.buf is not None
    try:
        cache = make_cache(ours.buf)
        cache.layers[1].keys[2] = 7.0
        start = 2 * cache.layout.block_bytes
        seen = np.frombuffer(bytes(theirs.buf[start : start + cache.layout.block_bytes]), np.float32)
        assert (seen.reshape(SHAPE[1:])[:, 1, 0] == 7.0).all()
        theirs.buf[:4] = np.float32(3.0).tobytes()
        assert cache.layers[0].keys[0, 0, 0, 0, 0] == 3.0
        del cache
    finally:
        theirs.close()
        ours.close()
        ours.unlink()


def test_a_buffer_that_is_too_small_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="the buffer must have"):
        make_cache(memoryview(bytearray(SHAPE[0] * make_layout().block_bytes - 1)))


@pytest.mark.parametrize("block_id", [-1, 5])
def test_a_block_outside_the_cache_is_our_bug(block_id: int) -> None:
    with pytest.raises(AssertionError, match="block_id must be below 5"):
        make_cache().block_view(BlockId(block_id))


def test_checksums_are_of_each_head_of_each_block() -> None:
    cache = make_cache()
    blocks = np.random.default_rng(1).random(SHAPE, dtype=np.float32)
    cache.memory[:] = blocks.tobytes()
    checksums = cache.checksums([BlockId(4), BlockId(0)])
    assert checksums == {
        block: tuple(xxhash.xxh3_64_intdigest(head.tobytes()) for head in blocks[block]) for block in (4, 0)
    }
    cache.layers[2].values[4, 1, 3, 7] += 1
    changed = cache.checksums([BlockId(4), BlockId(0)])
    assert changed[BlockId(4)][0] == checksums[BlockId(4)][0]
    assert changed[BlockId(4)][1] != checksums[BlockId(4)][1]
    assert changed[BlockId(0)] == checksums[BlockId(0)]
