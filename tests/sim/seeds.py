"""Many seeds, on all cores: `make sim SEEDS=100000`."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.sim.draw import draw_plan
from tests.sim.mutants import MUTANTS, planted
from tests.sim.plan import Plan
from tests.sim.scenario import Violation, run
from tests.sim.shrink import describe, shrink

CHUNK = 25
MAX_CPU_S = 20.0
"""Of one seed, which takes a thousandth of it: more is a loop without an end."""


def violation(plan: Plan) -> Violation | None:
    """Why it fails; None when it does not."""
    try:
        with bounded():
            run(plan)
    except Violation as found:
        return found
    return None


@contextmanager
def bounded() -> Iterator[None]:
    """Raises: AssertionError in the middle of what takes too long."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"not at its end after {MAX_CPU_S:g} s of CPU")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def failing(seeds: Sequence[int]) -> tuple[list[tuple[int, str]], float]:
    """Seeds of these that fail, and why; and the CPU time that all took, in seconds."""
    started_s = time.process_time()
    found = [(seed, failure.problem) for seed in seeds if (failure := violation(draw_plan(seed)))]
    return found, time.process_time() - started_s


def run_seeds(first: int, count: int, num_processes: int, max_failures: int = 1) -> list[tuple[int, str]]:
    """Try so many seeds, but for what is left when some have failed, and say how far it is."""
    chunks = [range(start, min(start + CHUNK, first + count)) for start in range(first, first + count, CHUNK)]
    found: list[tuple[int, str]] = []
    cpu_s, num_done, started_s = 0.0, 0, time.monotonic()
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        for (failures, chunk_s), chunk in zip(pool.imap(failing, chunks), chunks, strict=True):
            found += failures
            for seed, problem in failures:
                say(f"seed {seed}: {problem}")
            cpu_s += chunk_s
            num_done += len(chunk)
            if num_done % 1000 < CHUNK or num_done == count:
                each, elapsed_s = f"{1000 * cpu_s / num_done:.1f} ms of CPU each", time.monotonic() - started_s
                say(f"{num_done} seeds, {each}, {elapsed_s:.0f} s: {len(found)} fail")
            if len(found) >= max_failures:
                break
    return found


def explain(seed: int) -> None:
    """Shrink a seed that fails, and tell what happens in it."""
    plan = shrink(draw_plan(seed), violation)
    lines: list[str] = []
    failure: Violation | None = None
    try:
        with bounded():
            run(plan, lines.append)
    except Violation as found:
        failure = found
    say("\n".join(lines))
    say(f"seed {seed} fails, and so does\n{describe(plan)}\n{failure}")


def first_seed_that_finds(name: str, count: int) -> int | None:
    """The first seed that a planted bug makes fail; None when none of so many does."""
    with planted(name):
        return next((seed for seed in range(count) if violation(draw_plan(seed))), None)


def find_mutants(count: int, num_processes: int) -> list[str]:
    """Plant each bug and look for it. Returns those that were not found."""
    missed: list[str] = []
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        tasks = [(name, pool.apply_async(first_seed_that_finds, (name, count))) for name in MUTANTS]
        for name, task in tasks:
            seed = task.get()
            say(f"{name:45} {'not found' if seed is None else f'seed {seed}'}")
            if seed is None:
                missed.append(name)
    return missed


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.seeds", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many to try")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--explain", type=int, metavar="SEED", help="shrink this one and print its trace")
    parser.add_argument("--mutants", action="store_true", help="plant bugs, and try seeds until each is found")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--max-failures", type=int, default=1)
    options = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    if options.explain is not None:
        explain(options.explain)
        return 0
    if options.mutants:
        return 1 if find_mutants(options.seeds, options.processes) else 0
    found = run_seeds(options.first, options.seeds, options.processes, options.max_failures)
    if found:
        explain(found[0][0])
    for seed, problem in found:
        say(f"seed {seed}: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
