"""Memory that the ranks of a group on one host share. What lies in it is used by src/group.h. Free of torch."""

import ctypes
import mmap
import os
import time
from ctypes import Structure, c_char, c_uint32, c_uint64

from kernels.cpu.library import GroupStruct

_CACHE_LINE = 64
_HALF_BYTES = 256 << 10
"""2,048 rows of 576 values took 2.6 ms, with 64 KiB 4.4, with 1 MiB 3.1 (2 ranks, AVX2 VM with 2 cores of an EPYC)."""


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


def _halves_at(size: int) -> int:
    """Where the data begins, behind the abort word and the ranks: at a page."""
    used = _CACHE_LINE + size * ctypes.sizeof(RankStruct)
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE


def _num_bytes(size: int) -> int:
    return _halves_at(size) + size * 2 * _HALF_BYTES
