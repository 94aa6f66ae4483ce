"""The paged KV cache of one rank. The only place that states the layout; device_cache.py has it on a GPU."""

import mmap
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from common.engine.model_config import ModelConfig
from common.ids import BlockId
from common.kv_layout import HeadChecksums, KVLayout, head_checksums
from common.shard_memory import BlockMemory, ShardMemory
from kernels.paged_kv import LayerKV, values_per_word

LAYOUT_NAME = "head-words"
"""Head after head, each with the innermost [block_size, head_dim] in the order of kernels.paged_kv."""


TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By the names that layouts and flags use."""


def kv_layout(config: ModelConfig, dtype: str, block_size: int, model_hash: str) -> KVLayout:
    """What a block of this model is."""
    return KVLayout(
        name=LAYOUT_NAME,
        dtype=dtype,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        model_hash=model_hash,
    )


class PagedCache(Protocol):
    """All blocks of a rank, wherever they lie.

    blocks:  [num_blocks or more, num_kv_heads, …], each block one piece
    layers:  a view of each, strided over blocks and heads
    """

    @property
    def layout(self) -> KVLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def blocks(self) -> Tensor: ...

    @property
    def layers(self) -> Sequence[LayerKV]: ...

    def checksums(self, block_ids: Iterable[BlockId]) -> dict[BlockId, HeadChecksums]:
        """Of each block, one for each head that this cache has."""
        ...

    def shard_memory(self, heads: range) -> BlockMemory:
        """For the transfer, in whichever thread. heads: of the model, that this cache has."""
        ...


class KVCache:
    """All blocks in one allocation: `[num_blocks, num_kv_heads, num_layers, 2 (K, V), block_size, head_dim]`.

    A block with all its layers is one contiguous piece, so moving it is one copy; so is every range of its heads,
    whatever the caches that they come from and go to have of them.

    blocks, layers: see `PagedCache`
    """

    def __init__(self, layout: KVLayout, num_blocks: int, buffer: mmap.mmap | memoryview | None = None) -> None:
        """Lay the cache over the start of `buffer`, or over memory of its own.

        buffer:  writable, at least num_blocks * layout.block_bytes, zeroed; must outlive the cache
        """
        num_bytes = num_blocks * layout.block_bytes
        if buffer is None:
            buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            buffer.madvise(mmap.MADV_HUGEPAGE)
        assert len(buffer) >= num_bytes, f"the buffer must have {num_bytes} bytes, got {len(buffer)}"
        shape = (num_blocks, layout.num_kv_heads, layout.num_layers, 2, layout.block_size, layout.head_dim)
        self.layout = layout
        self.num_blocks = num_blocks
        self.memory = memoryview(buffer).cast("B")[:num_bytes]
        self.blocks = torch.frombuffer(self.memory, dtype=TORCH_DTYPES[layout.dtype]).view(shape)
        self.layers = layer_views(self.blocks)

    def block_view(self, block_id: BlockId) -> memoryview:
        """The bytes of one block, writable."""
        assert 0 <= block_id < self.num_blocks, f"block_id must be below {self.num_blocks}, got {block_id}"
        start = block_id * self.layout.block_bytes
        return self.memory[start : start + self.layout.block_bytes]

    def checksums(self, block_ids: Iterable[BlockId]) -> dict[BlockId, HeadChecksums]:
        head_bytes = self.layout.head_bytes
        return {block_id: head_checksums(self.block_view(block_id), head_bytes) for block_id in block_ids}

    def shard_memory(self, heads: range) -> ShardMemory:
        return ShardMemory(self.memory, heads, self.layout.head_bytes)


def layer_views(blocks: Tensor) -> tuple[LayerKV, ...]:
    """blocks: as a cache has them, [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]."""
    return tuple(_layer_kv(blocks[:, :, index]) for index in range(blocks.shape[2]))


def _layer_kv(blocks: Tensor) -> LayerKV:
    """blocks: [num_blocks, num_kv_heads, 2, block_size, head_dim], whose last two dimensions are one piece."""
    block_size, head_dim = blocks.shape[3:]
    pair = values_per_word(blocks.dtype)
    pieces = blocks.flatten(3)
    keys = pieces[:, :, 0].unflatten(2, (head_dim // pair, block_size, pair))
    return LayerKV(keys, pieces[:, :, 1].unflatten(2, (block_size // pair, head_dim, pair)))
