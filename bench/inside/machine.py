"""What the machine could do at most: how fast its cores read memory, and how fast they multiply matrices."""

# pyright: basic

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.cpu.memory import HugeMemory

_READ_BYTES = 2**30
"""More than the caches that cores have in common hold on most machines."""
_MATRIX_SIZE = 2048
_REPEATS = 7


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Of all cores together. flops: multiplications and additions a second, in `dtype`."""

    num_cores: int
    dtype: str
    read_bytes_per_s: float
    flops: float

    def shortest_s(self, num_bytes: float, num_flops: float) -> float:
        """Reading and computing at the same time, both at their limit."""
        return max(num_bytes / self.read_bytes_per_s, num_flops / self.flops)


def measure_limits(num_cores: int, dtype: torch.dtype) -> MachineLimits:
    """By PyTorch's own sums and products. Takes about two seconds; the number of PyTorch's threads stays as it was."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_cores)
    try:
        memory = HugeMemory().zeros((_READ_BYTES // 4,), torch.float32).fill_(1)
        read_s = _fastest_s(memory.sum)
        a, b = (torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, dtype=dtype) for _ in range(2))
        multiply_s = _fastest_s(lambda: a @ b)
    finally:
        torch.set_num_threads(num_threads)
    name = str(dtype).removeprefix("torch.")
    return MachineLimits(num_cores, name, _READ_BYTES / read_s, 2 * _MATRIX_SIZE**3 / multiply_s)


def _fastest_s(work: Callable[[], object]) -> float:
    """A limit is what was reached once."""
    times_s: list[float] = []
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)
