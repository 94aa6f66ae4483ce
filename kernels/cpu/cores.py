"""The board on which workers of one host see which cores are wanted: memory that pool.h reads."""

import mmap
from dataclasses import dataclass

CORE_BYTES = 64
"""sizeof(Core)."""


@dataclass(frozen=True, slots=True)
class Cores:
    """A worker's view of the host's cores.

    board:   one Core after the other, shared with the other workers if there are any; must outlive the ops
    worker:  our bit in it
    """

    board: mmap.mmap
    num_cores: int
    worker: int


def private_cores(num_cores: int) -> Cores:
    """Cores that nobody else is told of; all are at home here."""
    board = mmap.mmap(-1, num_cores * CORE_BYTES)
    for core in range(num_cores):
        board[core * CORE_BYTES] = 1
    return Cores(board, num_cores, 0)
