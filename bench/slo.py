"""Service level objectives: what a request must keep to count as served. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bench.measure import RequestFigures, was_stopped
from common.bench_config import BenchObjectiveOptions

_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits in seconds; None: any time will do."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def __str__(self) -> str:
        limits = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
        return ", ".join(f"{name} ≤ {limit_s * 1000:.4g} ms" for name, limit_s in limits if limit_s is not None)

    def are_met_by(self, request: RequestFigures) -> bool:
        """A failed request meets none. A request of one token has no TPOT to miss."""
        if not request.is_done or request.ttft_s is None:
            return False
        is_first_in_time = self.ttft_s is None or request.ttft_s <= self.ttft_s
        return is_first_in_time and (self.tpot_s is None or (request.tpot_s or 0.0) <= self.tpot_s)


@dataclass(frozen=True, slots=True)
class Unloaded:
    """Latencies of a server that has one request at a time: medians, in seconds."""

    ttft_s: float
    tpot_s: float
    e2e_s: float


def need_unloaded(options: BenchObjectiveOptions) -> bool:
    """Whether an objective is a multiple of the unloaded latency."""
    return any(text.endswith("x") for text in (options.ttft_slo, options.tpot_slo))


def resolve(options: BenchObjectiveOptions, unloaded: Unloaded | None) -> Objectives:
    """Every multiple becomes seconds. unloaded: needed only where `need_unloaded`."""
    return Objectives(
        ttft_s=_limit(options.ttft_slo, options.ttft_floor, unloaded and unloaded.ttft_s),
        tpot_s=_limit(options.tpot_slo, options.tpot_floor, unloaded and unloaded.tpot_s),
    )


def attainment(requests: Sequence[RequestFigures], objectives: Objectives) -> float:
    """Share of the requests that met all objectives, failed ones included, stopped ones not. 0 of none."""
    ended = [request for request in requests if not was_stopped(request)]
    return sum(objectives.are_met_by(request) for request in ended) / len(ended) if ended else 0.0


def _limit(text: str, floor: str, unloaded_s: float | None) -> float | None:
    if not text:
        return None
    if not text.endswith("x"):
        return parse_duration(text)
    assert unloaded_s is not None, "a multiple needs the unloaded latency"
    return max(float(text.removesuffix("x")) * unloaded_s, parse_duration(floor) if floor else 0.0)


def parse_duration(text: str) -> float:
    """Seconds of `250ms` or `1.5s`."""
    match = re.fullmatch(r"([\d.]+)(ms|s)", text)
    assert match is not None, f"the flag's pattern let {text!r} through"
    return float(match[1]) * _UNITS[match[2]]
