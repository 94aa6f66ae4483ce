"""What gateways add and cost, from both sides of them: its clients' times and its workers'. Pure.

Definitions; clients and workers have one clock, since they are one process:

- CPU per token: of all threads of the gateways' processes, over the tokens that workers sent meanwhile. Requests,
  statuses and its idle life are in it.
- TTFT added: a client's TTFT less the time in which the worker had the prompt.
- Delay of a token: from the worker's sending it to the client's reading it.
- Gap added: a client's time between two tokens less the workers' time between them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bench.figures import Distribution, distribution
from bench.measure import RequestFigures


@dataclass(slots=True)
class Served:
    """One request as the workers saw it, by time.perf_counter. Mutable: it is filled while the request runs.

    asked_s:  when its PrefillRequest came
    sent_s:   when each of its tokens was sent
    """

    asked_s: float
    sent_s: list[float]


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run in which all streams are under way, and CPU seconds used in it.

    begin_s, end_s:  by time.perf_counter
    """

    begin_s: float
    end_s: float
    gateway_cpu_s: float
    bench_cpu_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s

    def holds(self, time_s: float) -> bool:
        return self.begin_s <= time_s < self.end_s


@dataclass(frozen=True, slots=True)
class StreamsFigures:
    """Of a number of streams. Latencies in seconds; None without a sample.

    num_gateways:  that the streams were spread over
    cpu_per_token_s:  of all gateways
    cpu_share, bench_cpu_share:  of one core: that of all gateways, and that of client and workers together
    failures:  by kind
    """

    num_streams: int
    num_gateways: int
    num_requests: int
    failures: Mapping[str, int]
    tokens_per_s: float
    cpu_per_token_s: float
    cpu_share: float
    bench_cpu_share: float
    added_ttft: Distribution | None
    token_delay: Distribution | None
    added_gap: Distribution | None


@dataclass(slots=True)
class GatewayReport:
    """All results. Mutable: it grows with each number of streams. idle_cpu_share: of one core, without requests."""

    options: Mapping[str, object]
    idle_cpu_share: float
    streams: list[StreamsFigures] = field(default_factory=list[StreamsFigures])
    is_stopped: bool = False

    @property
    def num_failed(self) -> int:
        return sum(sum(figures.failures.values()) for figures in self.streams)


def summarize_streams(
    num_streams: int, num_gateways: int, requests: Sequence[tuple[RequestFigures, Served]], window: Window
) -> StreamsFigures:
    """requests: each as its client and its workers saw it, by one clock."""
    num_tokens = sum(window.holds(time_s) for _, served in requests for time_s in served.sent_s)
    # Elsewhere two tokens came as one event, such as the halves of a character: which they were is not known.
    timed = [pair for pair in requests if pair[0].is_done and len(pair[0].event_times_s) == len(pair[1].sent_s)]
    delays = [_delays(figures, served, window) for figures, served in timed]
    return StreamsFigures(
        num_streams=num_streams,
        num_gateways=num_gateways,
        num_requests=len(requests),
        failures=Counter(figures.failure for figures, _ in requests if figures.failure),
        tokens_per_s=num_tokens / window.length_s,
        cpu_per_token_s=window.gateway_cpu_s / num_tokens if num_tokens else 0.0,
        cpu_share=window.gateway_cpu_s / window.length_s,
        bench_cpu_share=window.bench_cpu_s / window.length_s,
        added_ttft=distribution(
            [
                figures.ttft_s - (served.sent_s[0] - served.asked_s)
                for figures, served in timed
                if figures.ttft_s is not None and window.holds(figures.sent_s)
            ]
        ),
        token_delay=distribution([delay_s for of_stream in delays for delay_s in of_stream]),
        added_gap=distribution([later - earlier for of_stream in delays for earlier, later in pairwise(of_stream)]),
    )


def _delays(figures: RequestFigures, served: Served, window: Window) -> list[float]:
    """Of a stream's tokens that were sent in the window; each had an event of its own."""
    pairs = zip(figures.event_times_s, served.sent_s, strict=True)
    return [came_s - sent_s for came_s, sent_s in pairs if window.holds(sent_s)]
