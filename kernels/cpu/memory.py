"""Memory for what is read from end to end in every step."""

import math
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 1 << 21
_CHUNK = 32 << 20
_ALIGNMENT = 64


class HugeMemory:
    """Hands out pieces of large chunks, which lie in huge pages where the system has them.

    A weight alone would begin and end in small pages, from which one core reads 12 GB/s and not 17 (256 MB, Xeon 6,
    2026-12). A chunk is freed with the last tensor in it. Mutable: the chunk that has room.
    """

    def __init__(self) -> None:
        self._chunk = memoryview(b"")
        self._used = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        num_bytes = count * dtype.itemsize
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = _map_chunk(max(num_bytes, _CHUNK)), 0
        piece = torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=self._used)
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece.view(shape)


class HugeBuffer:
    """Rows of fp32 that are written anew in every step, in huge pages: rows in small ones are a page apart, and a core
    knows the places of few pages at a time; and what is allocated anew would be mapped and zeroed first.

    Mutable: the memory, which grows.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, num_rows: int, size: int) -> Tensor:
        """[num_rows, size], with whatever was there; what was taken before lies in the same place, or keeps its own."""
        count = num_rows * size
        if len(self._memory) < count:
            self._memory = HugeMemory().zeros((count,), torch.float32)
        return self._memory[:count].view(num_rows, size)


def _map_chunk(num_bytes: int) -> memoryview:
    """Zeroed, and from one border of huge pages to another."""
    size = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    return memoryview(memory)[start : start + size]
