"""Times of collectives, by ranks in processes of their own: `python -m kernels.bench all_reduce --help`.

A sample is of calls in a row, at rank 0, divided by their number: after the first one the ranks are as close to one
another as an exchange leaves them, and what is timed is not how far apart they were before it.
"""

# pyright: basic

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kernels.cpu.group import NativeGroup
from kernels.cpu.group_memory import GroupMemory
from kernels.cpu.library import NoNativeOps, best_library
from kernels.group import Group
from kernels.torch_group import TorchGroup, connect, listen

_NUM_WARMUPS = 2
_CALLS_IN_A_ROW = 10
_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Plan:
    """All-reduces of [each of num_rows, hidden] fp32, by `size` ranks. fd, port: where they meet."""

    num_rows: Sequence[int]
    hidden: int
    repeats: int
    size: int
    fd: int
    port: int


@dataclass(frozen=True, slots=True)
class Timing:
    size: int
    num_rows: int
    group: str
    times_s: Sequence[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)


def measure(num_rows: Sequence[int], hidden: int, repeats: int, size: int) -> list[Timing]:
    """Be rank 0, of processes that are gone afterwards.

    Raises: NoNativeOps, GroupBroken.
    """
    memory, store = GroupMemory.create(size), listen(size)
    plan = Plan(num_rows, hidden, repeats, size, memory.fd, store.port)
    command = [sys.executable, "-m", "kernels.group_bench", json.dumps(asdict(plan))]
    others = [subprocess.Popen([*command, str(rank)], pass_fds=[memory.fd]) for rank in range(1, size)]
    try:
        return _time_both(plan, memory, TorchGroup(store, 0, size, timeout_s=_TIMEOUT_S))
    finally:
        memory.abort()
        for process in others:
            process.wait()


def _take_part(plan: Plan, rank: int) -> None:
    """Be another rank."""
    torch.set_num_threads(1)
    memory = GroupMemory(plan.fd, plan.size)
    group = TorchGroup(connect(plan.port, plan.size), rank, plan.size, timeout_s=_TIMEOUT_S)
    _time_both(plan, memory, group)


def _time_both(plan: Plan, memory: GroupMemory, torch_group: TorchGroup) -> list[Timing]:
    has_cores = len(os.sched_getaffinity(0)) >= plan.size
    native = NativeGroup(best_library()[1], memory, torch_group.rank, spin=has_cores)
    groups = {"native": native, "torch, gloo": torch_group}
    timings = [timing for rows in plan.num_rows for timing in _time(plan, rows, groups)]
    torch_group.close()
    return timings


def _time(plan: Plan, num_rows: int, groups: Mapping[str, Group]) -> list[Timing]:
    """One kind after the other, again and again: what else the machine does meets all of them."""
    x = torch.zeros(num_rows, plan.hidden)
    times_s: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(_NUM_WARMUPS + plan.repeats):
        for name, group in groups.items():
            group.all_reduce(x)
            started_s = time.perf_counter()
            for _ in range(_CALLS_IN_A_ROW):
                group.all_reduce(x)
            times_s[name].append((time.perf_counter() - started_s) / _CALLS_IN_A_ROW)
    return [Timing(plan.size, num_rows, name, each[_NUM_WARMUPS:]) for name, each in times_s.items()]


def show(hidden: int, timings: Sequence[Timing]) -> None:
    table = Table(title=f"All-reduce of rows of {hidden} fp32 values", title_justify="left")
    for name in ("ranks", "rows", "group", "median, µs", "min", "max", "repeats"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for timing in timings:
        times_us = [1e6 * each for each in (timing.median_s, min(timing.times_s), max(timing.times_s))]
        numbers = *(f"{each:.0f}" for each in times_us), str(len(timing.times_s))
        table.add_row(str(timing.size), str(timing.num_rows), timing.group, *numbers)
    Console(highlight=False).print(table)


def main(argv: Sequence[str]) -> int:
    """Returns 1 when there are no native ops."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench all_reduce", description="Time all-reduces.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 512, 2048])
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path, help="file for every sample")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        timings = [
            timing for size in options.ranks for timing in measure(options.rows, options.hidden, options.repeats, size)
        ]
    except NoNativeOps as error:
        Console(stderr=True, highlight=False).print(f"kernels.bench: error: {error}")
        return 1
    show(options.hidden, timings)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in timings]))
    return 0


if __name__ == "__main__":
    _take_part(Plan(**json.loads(sys.argv[1])), int(sys.argv[2]))
