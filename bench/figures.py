"""From measured requests to the figures of a run. Pure.

Latencies and throughputs are of the requests that succeeded; the others are counted by kind. Throughput is over the
time from the run's begin to the last end of a request. Percentiles are interpolated between the two nearest samples.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.measure import RequestFigures, was_stopped
from bench.slo import Objectives, Unloaded, attainment
from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds, of `num` samples."""

    num: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class RunFigures:
    """A run, or one group of its requests. Times in seconds, rates per second.

    ttft, itl, tpot, e2e:  None without a sample; defined in `bench.measure`
    longest_gap_s:         between two events of one stream
    attainment:            share that met the objectives; None without objectives
    goodput_rps:           requests/s that met them
    max_send_lag_s:        how late the client sent what it should have sent at a time
    cached_share:          of prompt tokens, by the servers' own word
    """

    num_completed: int
    num_stopped: int
    failures: Mapping[str, int]
    duration_s: float
    request_throughput: float
    output_throughput: float
    total_throughput: float
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    longest_gap_s: float
    attainment: float | None
    goodput_rps: float | None
    max_send_lag_s: float
    cached_share: float
    num_without_usage: int
    mismatches: tuple[str, ...]

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())


def distribution(samples: Sequence[float]) -> Distribution | None:
    if not samples:
        return None
    p50, p90, p99 = np.percentile(samples, [50, 90, 99]).tolist()
    return Distribution(len(samples), float(np.mean(samples)), p50, p90, p99, max(samples))


def summarize(requests: Sequence[RequestFigures], objectives: Objectives) -> RunFigures:
    done = [request for request in requests if request.is_done]
    duration_s = max((request.ended_s for request in requests), default=0.0)
    num_output, num_input = sum(r.num_output for r in done), sum(r.num_input for r in done)
    per_s = 1 / duration_s if duration_s else 0.0
    attained = attainment(requests, objectives) if objectives else None
    return RunFigures(
        num_completed=len(done),
        num_stopped=sum(map(was_stopped, requests)),
        failures=dict(Counter(r.failure for r in requests if r.failure and not was_stopped(r)).most_common()),
        duration_s=duration_s,
        request_throughput=len(done) * per_s,
        output_throughput=num_output * per_s,
        total_throughput=(num_input + num_output) * per_s,
        ttft=distribution([r.ttft_s for r in done if r.ttft_s is not None]),
        itl=distribution([gap_s for r in done for gap_s in r.gaps_s()]),
        tpot=distribution([r.tpot_s for r in done if r.tpot_s is not None]),
        e2e=distribution([r.e2e_s for r in done]),
        longest_gap_s=max((r.longest_gap_s for r in done), default=0.0),
        attainment=attained,
        goodput_rps=sum(map(objectives.are_met_by, requests)) * per_s if objectives else None,
        max_send_lag_s=max((r.sent_s - r.scheduled_s for r in requests if r.scheduled_s is not None), default=0.0),
        cached_share=sum(r.num_cached for r in done) / num_input if num_input else 0.0,
        num_without_usage=sum(not r.has_usage for r in done),
        mismatches=tuple(r.mismatch for r in done if r.mismatch),
    )


def unloaded_latencies(requests: Sequence[RequestFigures]) -> Unloaded:
    """Medians of requests that ran alone. Raises: ConfigError when they have no time per token."""
    figures = summarize(requests, Objectives())
    if figures.ttft is None or figures.tpot is None or figures.e2e is None:
        raise ConfigError("--output-len: wanted at least 2 tokens, for an unloaded time per token")
    return Unloaded(figures.ttft.p50, figures.tpot.p50, figures.e2e.p50)
