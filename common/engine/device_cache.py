"""The paged KV cache of a rank on a GPU, and how its blocks get into the host's memory and back."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from common.engine.kv_cache import TORCH_DTYPES, layer_views
from common.ids import BlockId
from common.kv_layout import HeadChecksums, KVLayout, head_checksums


class StagingOps(Protocol):
    """As kernels/staging.py has them."""

    def gather_blocks(self, blocks: Tensor, block_ids: Tensor, first_head: int, staging: Tensor) -> None: ...

    def scatter_blocks(self, staging: Tensor, blocks: Tensor, block_ids: Tensor, first_head: int) -> None: ...


class DeviceKVCache:
    """As `KVCache`, in a GPU's memory. Owned by the thread that computes, but for what `shard_memory` gives.

    spare_block:  one more than there are, which belongs to nobody: rows that only fill up a batch write there
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device, ops: StagingOps) -> None:
        """Raises: torch.OutOfMemoryError."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.spare_block = BlockId(num_blocks)
        shape = (num_blocks + 1, layout.num_kv_heads, layout.num_layers, 2, layout.block_size, layout.head_dim)
        blocks = torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=device)
        self.layers = layer_views(blocks)
        self.blocks = blocks.flatten(2)
        self._ops = ops

    @property
    def ops(self) -> StagingOps:
        return self._ops

    def checksums(self, block_ids: Iterable[BlockId]) -> dict[BlockId, HeadChecksums]:
        """As the host's cache. Waits for the step that computes the blocks."""
        ids = list(block_ids)
        if not ids:  # as in most decode steps, which then are not waited for
            return {}
        heads = range(self.layout.num_kv_heads)
        pieces = Staging(self, heads, None).read(ids, heads)
        head_bytes = self.layout.head_bytes
        return {block_id: head_checksums(piece, head_bytes) for block_id, piece in zip(ids, pieces, strict=True)}

    def shard_memory(self, heads: range) -> "Staging":
        """heads: of the model, that this cache has. It copies beside the steps, on a stream of its own."""
        device = self.blocks.device
        return Staging(self, heads, torch.cuda.Stream(device) if device.type == "cuda" else None)


class Staging:
    """Implements `BlockMemory`: every piece is a copy in the host's memory, pinned, and belongs to who holds it.

    stream: that copies run on; None: the current one
    """

    def __init__(self, cache: DeviceKVCache, heads: range, stream: "torch.cuda.Stream | None") -> None:
        self.heads = heads
        self.head_bytes = cache.layout.head_bytes
        self._cache = cache
        self._stream = stream

    @torch.inference_mode()
    def read(self, block_ids: Sequence[BlockId], heads: range) -> Sequence[memoryview]:
        """Waits for the copy."""
        host = self.allocate(len(block_ids), heads)
        blocks = self._cache.blocks
        with self._on_stream():
            staging = torch.empty_like(host, device=blocks.device)
            self._cache.ops.gather_blocks(blocks, self._ids(block_ids), heads.start - self.heads.start, staging)
            host.copy_(staging, non_blocking=True)
            self._wait()
        return pieces_of(host)

    def arrivals(self, block_ids: Sequence[BlockId], heads: range) -> "StagedArrivals":
        return StagedArrivals(self, block_ids, heads)

    @torch.inference_mode()
    def write(self, host: Tensor, block_ids: Sequence[BlockId], heads: range) -> None:
        """host: [len(block_ids), len(heads), head_values], pinned. Waits for the copy."""
        blocks = self._cache.blocks
        with self._on_stream():
            staging = host.to(blocks.device, non_blocking=True)
            self._cache.ops.scatter_blocks(staging, blocks, self._ids(block_ids), heads.start - self.heads.start)
            self._wait()

    def allocate(self, num_blocks: int, heads: range) -> Tensor:
        """Room in the host's memory: [num_blocks, len(heads), head_values]. PyTorch keeps pinned memory to reuse it."""
        blocks = self._cache.blocks
        shape = (num_blocks, len(heads), blocks.shape[2])
        return torch.empty(shape, dtype=blocks.dtype, pin_memory=blocks.device.type == "cuda")

    def _ids(self, block_ids: Sequence[BlockId]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._cache.blocks.device)

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def _wait(self) -> None:
        if self._cache.blocks.device.type == "cuda":
            (self._stream or torch.cuda.current_stream(self._cache.blocks.device)).synchronize()


class StagedArrivals:
    """Implements `Arrivals`."""

    def __init__(self, staging: Staging, block_ids: Sequence[BlockId], heads: range) -> None:
        self._staging = staging
        self._block_ids = block_ids
        self._heads = heads
        self._host = staging.allocate(len(block_ids), heads)
        self.pieces = pieces_of(self._host)

    def keep(self, positions: Sequence[int]) -> None:
        if positions:
            host = self._host if len(positions) == len(self.pieces) else self._host[list(positions)]
            self._staging.write(host, [self._block_ids[position] for position in positions], self._heads)


def pieces_of(host: Tensor) -> list[memoryview]:
    """The bytes of each block. host: [num_blocks, num_heads, head_values], contiguous."""
    return [memoryview(block.numpy().data) for block in host.view(torch.uint8).flatten(1)]
