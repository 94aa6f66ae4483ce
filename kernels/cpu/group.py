"""A group of processes of one host, over memory that they share. What lies in it is used by src/group.h."""

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from ctypes import Structure, c_char, c_int64, c_uint32, c_uint64

import torch
from torch import Tensor

from kernels.cpu.library import GroupStruct
from kernels.group import GroupBroken

_CACHE_LINE = 64
_HALF_BYTES = 256 << 10
"""2,048 rows of 576 values took 2.6 ms, with 64 KiB 4.4, with 1 MiB 3.1 (2 ranks, AVX2 VM with 2 cores of an EPYC)."""
_SPIN_NS = 20_000
"""A few times an exchange of one row between ranks that come together; longer waits are for ranks that compute."""


class RankStruct(Structure):
    """GroupRank: a cache line that changes with every chunk, and one for the heartbeat."""

    _fields_ = (
        ("arrived", c_uint32),
        ("num_waiting", c_uint32),
        ("_apart", c_char * 56),
        ("beat_ns", c_uint64),
        ("_rest", c_char * 56),
    )


class GroupMemory:
    """What the ranks of a group share: their data on its way, whether they live, and whether the group was aborted.

    A memory without a name, which is gone with the last process that has it. Every rank may also be watched and the
    group aborted by a process that is no rank.
    """

    def __init__(self, fd: int, size: int) -> None:
        """fd: as another GroupMemory of the same size has it, in this process or one that we inherit from; now ours."""
        self.fd = fd
        self.size = size
        self._memory = mmap.mmap(fd, _num_bytes(size))
        self._is_aborted = c_uint32.from_buffer(self._memory)
        self.ranks = (RankStruct * size).from_buffer(self._memory, _CACHE_LINE)

    def __del__(self) -> None:
        os.close(self.fd)

    @staticmethod
    def create(size: int) -> "GroupMemory":
        """The memory of a new group of so many ranks. All of them have given a sign of life."""
        fd = os.memfd_create("baton-group")
        os.ftruncate(fd, _num_bytes(size))
        memory = GroupMemory(fd, size)
        for rank in range(size):
            memory.beat(rank)
        return memory

    def beat(self, rank: int) -> None:
        """Say that this rank lives."""
        self.ranks[rank].beat_ns = time.monotonic_ns()

    def last_beat_s(self, rank: int) -> float:
        """By time.monotonic()."""
        return self.ranks[rank].beat_ns / 1e9

    def silent_ranks(self, for_s: float) -> list[int]:
        """Those that have given no sign of life for as long."""
        since_s = time.monotonic() - for_s
        return [rank for rank in range(self.size) if self.last_beat_s(rank) < since_s]

    def abort(self) -> None:
        """Let every call of every rank end with GroupBroken, those that wait now within 50 ms."""
        self._is_aborted.value = 1

    @property
    def is_aborted(self) -> bool:
        return bool(self._is_aborted.value)

    def struct_of(self, rank: int, *, spin_ns: int) -> GroupStruct:
        """The library's form of the group as this rank has it. We must outlive it."""
        address = ctypes.addressof(self._is_aborted)
        ranks, halves = ctypes.addressof(self.ranks), address + _halves_at(self.size)
        return GroupStruct(address, ranks, halves, _HALF_BYTES, rank, self.size, spin_ns)


class NativeGroup:
    """A rank's part in a group, in C++, on the calling thread. One thread at a time may call it.

    While a rank waits for others it sleeps, at the latest after a moment.
    """

    def __init__(self, library: ctypes.CDLL, memory: GroupMemory, rank: int, *, spin: bool) -> None:
        """library: see load_library;  spin: whether to look for the others for a moment before sleeping, which pays
        where each rank has a core of its own, and takes the others' time where not.
        """
        assert 0 <= rank < memory.size, f"rank {rank} of {memory.size}"
        self.rank = rank
        self.size = memory.size
        self._library = library
        self._memory = memory
        self._struct = memory.struct_of(rank, spin_ns=_SPIN_NS if spin else 0)
        self.address = ctypes.addressof(self._struct)

    def all_reduce(self, x: Tensor) -> None:
        assert x.is_contiguous()
        exact = x.float()
        if not self._library.baton_all_reduce(self.address, exact.data_ptr(), exact.numel()):
            raise GroupBroken("the group was aborted")
        if exact is not x:
            x.copy_(exact)

    def gather(self, x: Tensor, num_columns: Sequence[int]) -> Tensor | None:
        assert x.is_contiguous()
        assert x.dtype == torch.float32
        assert x.shape[1] == num_columns[self.rank]
        assert len(num_columns) == self.size
        out = torch.empty(len(x), sum(num_columns)) if self.rank == 0 else None
        pointers = (c_int64 * self.size)(*num_columns), None if out is None else out.data_ptr()
        if not self._library.baton_gather(self.address, x.data_ptr(), len(x), *pointers):
            raise GroupBroken("the group was aborted")
        return out


def _halves_at(size: int) -> int:
    """Where the data begins, behind the abort word and the ranks: at a page."""
    used = _CACHE_LINE + size * ctypes.sizeof(RankStruct)
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE


def _num_bytes(size: int) -> int:
    return _halves_at(size) + size * 2 * _HALF_BYTES
