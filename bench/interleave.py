"""Servers measured in turn, and compared pair by pair. Pure.

A machine's speed drifts: with neighbours, with its temperature, with what the page cache holds. A B B A puts each
server before and after the other, and a ratio of two runs that stand side by side has little of the drift in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from bench.figures import RunFigures

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of one server over the first server's, run by run.

    ratios: one for each repeat in which both have the metric
    """

    metric: str
    load: str
    server: str
    base: str
    ratios: tuple[float, ...]
    median: float
    min: float
    max: float


METRICS: dict[str, Callable[[RunFigures], float | None]] = {
    "output tokens/s": lambda figures: figures.output_throughput,
    "TTFT p50": lambda figures: figures.ttft and figures.ttft.p50,
    "TTFT p99": lambda figures: figures.ttft and figures.ttft.p99,
    "ITL p50": lambda figures: figures.itl and figures.itl.p50,
    "ITL p99": lambda figures: figures.itl and figures.itl.p99,
    "TPOT p50": lambda figures: figures.tpot and figures.tpot.p50,
    "E2E p50": lambda figures: figures.e2e and figures.e2e.p50,
    "longest gap": lambda figures: figures.longest_gap_s,
}


def in_turn(items: Sequence[Item], repeat: int) -> list[Item]:
    """The order of one repeat: forward, then backward: A B, B A, A B, …"""
    return list(items) if repeat % 2 == 0 else list(reversed(items))


def compare(metric: str, load: str, server: str, base: str, pairs: Sequence[tuple[float, float]]) -> Comparison | None:
    """pairs: (the server's, the base's) of each repeat. None where no pair has a ratio."""
    ratios = tuple(ours / theirs for ours, theirs in pairs if theirs)
    if not ratios:
        return None
    return Comparison(metric, load, server, base, ratios, median(ratios), min(ratios), max(ratios))
