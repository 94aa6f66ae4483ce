"""Plans by seeds: thousands of new ones, those that failed once, and what seeds are worth."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.wire import Role
from tests.sim import plan as plans
from tests.sim.draw import draw_plan
from tests.sim.mutants import MUTANTS, planted
from tests.sim.plan import Arrival, Break, Crash, Plan, WorkerPlan
from tests.sim.regressions import REGRESSIONS
from tests.sim.scenario import Violation, run
from tests.sim.seeds import violation
from tests.sim.shrink import describe, shrink

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_nothing_goes_wrong_in_two_thousand_seeds() -> None:
    """In processes of their own, on all cores."""
    command = [sys.executable, "-m", "tests.sim.seeds", "--seeds", "2000"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_failed_once_does_not(name: str) -> None:
    run(REGRESSIONS[name])


def test_a_seed_fixes_everything_that_happens() -> None:
    for seed in (1, 4):
        traces: list[list[str]] = [[], []]
        for trace in traces:
            run(draw_plan(seed), trace.append)
        assert traces[0] == traces[1]
        assert len(traces[0]) > 20


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    """By a seed of which that is known."""
    with planted(name):
        assert violation(draw_plan(MUTANTS[name].found_by)) is not None


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found_within_five_thousand_seeds(name: str) -> None:
    with planted(name):
        assert any(violation(draw_plan(seed)) for seed in range(5000))


def test_a_plan_is_shrunk_to_what_it_fails_by() -> None:
    """Here: by two requests, one of which is long, and a crash of the prefill worker."""
    workers = tuple(WorkerPlan(name=f"{role[0]}0", role=role) for role in (Role.PREFILL, Role.DECODE, Role.BOTH))
    arrivals = tuple(Arrival(at_s=index / 10, num_prompt=20, max_tokens=20, family=index) for index in range(8))
    faults = (
        Break(at_s=0.1, service="p0", other="g0"),
        Crash(at_s=0.2, service="p0", back_s=0.0),
        Crash(at_s=0.3, service="d0", back_s=0.0),
        Crash(at_s=0.9, service="p0", back_s=0.0),
    )

    def why(plan: Plan) -> Violation | None:
        is_bad = (
            len(plan.arrivals) >= 2
            and max(arrival.max_tokens for arrival in plan.arrivals) > 5
            and any(isinstance(fault, Crash) and fault.service == "p0" for fault in plan.faults)
        )
        return Violation("bad", 0.85) if is_bad else None

    plan = Plan(seed=3, gateways=("g0", "g1"), workers=workers, arrivals=arrivals, faults=faults)
    small = shrink(plan, why)
    assert small.faults == (Crash(at_s=0.2, service="p0", back_s=0.0),)
    assert sorted(arrival.max_tokens for arrival in small.arrivals) == [1, 6]
    assert [len(small.gateways), [worker.name for worker in small.workers]] == [1, ["b0"]]


def test_a_plan_is_described_by_what_makes_it() -> None:
    for seed in range(50):
        plan = draw_plan(seed)
        assert eval(describe(plan), {**vars(plans), "Role": Role}) == plan


def test_seeds_differ_in_more_than_delays() -> None:
    plans = {replace(draw_plan(seed), seed=0) for seed in range(200)}
    assert len(plans) == 200
