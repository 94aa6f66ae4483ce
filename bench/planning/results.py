"""What `baton bench plan` found, as it is written to --json. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.planning.costs import Fit
from bench.planning.measured import RunComparison
from bench.planning.planner import PoolsGoodput
from bench.slo import Objectives, Unloaded


@dataclass(frozen=True, slots=True)
class RequestsPlan:
    """For one kind of requests.

    requests:  the trace's name, or what was drawn
    pools:     each deployment that was asked for
    splits:    of each number of workers, every way to divide them
    """

    requests: str
    unloaded: Unloaded
    objectives: Objectives
    pools: Sequence[PoolsGoodput]
    splits: Mapping[int, Sequence[PoolsGoodput]]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """fits: of each kind of step and of handoffs, by what to call it."""

    options: Mapping[str, object]
    fits: Mapping[str, Fit]
    plans: Sequence[RequestsPlan]
    comparisons: Sequence[RunComparison]


def best(splits: Sequence[PoolsGoodput]) -> PoolsGoodput:
    """The highest goodput, which of equally many workers is also the highest of each."""
    return max(splits, key=lambda found: found.hit)
