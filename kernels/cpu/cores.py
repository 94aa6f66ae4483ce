"""The board on which workers of one host see which cores are wanted: memory that pool.h reads."""

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_CORE = struct.Struct("<QQQI36x")
"""pool.h's Core: homes, wanted, urgent, tenant; the rest keeps cores on cache lines of their own."""
_WANTED_AT, _URGENT_AT, _TENANT_AT = 8, 16, 24

CORE_BYTES = _CORE.size
LAYOUT_VERSION = 2
"""Of a core: workers that know another layout must not meet on one board."""
MAX_WORKERS = 64
"""A bit each."""


@dataclass(frozen=True, slots=True)
class Cores:
    """A worker's view of the host's cores.

    board:    one Core after the other, shared with the other workers if there are any; must outlive the ops
    worker:   our bit in it
    borrows:  whether we may use cores of others while they have no work
    """

    board: mmap.mmap
    num_cores: int
    worker: int
    borrows: bool = True

    def num_home(self) -> int:
        """Cores that are at home here now."""
        return sum(self.worker in homes for homes in read_homes(self.board, self.num_cores))


def private_cores(num_cores: int) -> Cores:
    """Cores that nobody else is told of; all are at home here."""
    board = mmap.mmap(-1, num_cores * CORE_BYTES)
    write_homes(board, num_cores, [0])
    return Cores(board, num_cores, 0)


def write_homes(board: mmap.mmap, num_cores: int, workers: Sequence[int]) -> None:
    """Deal the cores out to these workers, one after the other; where workers are more, some share a core.

    What workers that are not there any more had wanted or borrowed is forgotten. Others may be running: they see
    each core's change on its own.
    """
    homes = [0] * num_cores
    for turn in range(max(num_cores, len(workers))):
        homes[turn % num_cores] |= 1 << workers[turn % len(workers)]
    live = sum(1 << worker for worker in workers)
    for core in range(num_cores):
        at = core * CORE_BYTES
        _, wanted, urgent, tenant = _CORE.unpack_from(board, at)
        struct.pack_into("<Q", board, at, homes[core])
        if wanted & ~live:
            struct.pack_into("<Q", board, at + _WANTED_AT, wanted & live)
        if urgent & ~live:
            struct.pack_into("<Q", board, at + _URGENT_AT, urgent & live)
        if tenant and not live >> (tenant - 1) & 1:
            struct.pack_into("<I", board, at + _TENANT_AT, 0)


def write_urgency(board: mmap.mmap, num_cores: int, worker: int, *, is_urgent: bool) -> None:
    """Say whether somebody waits for each step of this worker. One writer at a time."""
    for at in range(0, num_cores * CORE_BYTES, CORE_BYTES):
        _, _, urgent, _ = _CORE.unpack_from(board, at)
        others = urgent & ~(1 << worker)
        struct.pack_into("<Q", board, at + _URGENT_AT, others | is_urgent << worker)


def read_homes(board: mmap.mmap, num_cores: int) -> list[set[int]]:
    """Of each core, the workers that are at home there."""
    homes = (_CORE.unpack_from(board, core * CORE_BYTES)[0] for core in range(num_cores))
    return [{worker for worker in range(MAX_WORKERS) if bits >> worker & 1} for bits in homes]
