"""Prometheus metrics of a gateway: what its clients see, what it counts itself, and what its workers report.

Names of the first are vLLM's, so that its dashboards work; the others are `baton_gateway_*_total` and
`baton_worker_*`. docs/metrics.md lists them.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.token_metrics import Counter, Histogram
from common.wire import Role, WorkerStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ABORT = "abort"
ERROR = "error"
"""Outcomes of a sequence besides its finish reasons."""

Workers = Callable[[], Mapping[str, WorkerStatus]]
Totals = Callable[[], Mapping[str, float]]

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_E2E_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_NUM_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_NUM_CHOICES = (1, 2, 5, 10, 20, 50, 100)
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


class GatewayMetrics:
    """All metrics of one gateway, in a registry of their own.

    workers: called at every scrape, for the last status of every live worker by name
    totals:  called at every scrape, for what the gateway has counted since its start
    """

    def __init__(self, model_name: str, workers: Workers, totals: Totals) -> None:
        disable_created_metrics()  # a second series for each, which nothing reads
        self._registry = CollectorRegistry(auto_describe=True)
        self._model_name = model_name
        self.num_running = self._gauge("num_requests_running", "Sequences whose first token is out")
        self.num_waiting = self._gauge("num_requests_waiting", "Sequences without a token yet")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.generation_tokens = self._counter("generation_tokens", "Tokens that reached a client's text")
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token", _TTFT_S)
        self.itl = self._histogram("inter_token_latency_seconds", "Between a sequence's tokens", _ITL_S)
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", _E2E_S)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens a request", _NUM_TOKENS)
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Output tokens a sequence", _NUM_TOKENS
        )
        self.request_n = self._histogram("request_params_n", "The parameter n", _NUM_CHOICES)
        self.request_max_tokens = self._histogram(
            "request_params_max_tokens", "The limit of output tokens", _NUM_TOKENS
        )
        self._outcomes = prometheus_client.Counter(
            "vllm:request_success",
            "Ended sequences by reason, also those that failed",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._registry.register(_WorkerMetrics(model_name, workers))
        self._registry.register(_GatewayTotals(model_name, totals))

    def count_outcome(self, reason: str) -> None:
        self._outcomes.labels(self._model_name, reason).inc()

    def render(self) -> bytes:
        """In Prometheus' text format, of the type CONTENT_TYPE."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"vllm:{name}", help, ["model_name"], registry=self._registry).labels(self._model_name)

    def _counter(self, name: str, help: str) -> Counter:
        counter = Counter(f"vllm:{name}", help, {"model_name": self._model_name})
        self._registry.register(counter)
        return counter

    def _histogram(self, name: str, help: str, bounds: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", help, {"model_name": self._model_name}, bounds)
        self._registry.register(histogram)
        return histogram


class SequenceTimer:
    """Observes one sequence from its arrival to its end; `end` is called exactly once, later calls are ignored."""

    def __init__(self, metrics: GatewayMetrics, arrival_s: float) -> None:
        """arrival_s: of the request, by time.perf_counter."""
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._last_token_s = 0.0
        self._num_tokens = 0
        self._has_ended = False
        metrics.num_waiting.inc()

    def add_tokens(self, num_tokens: int) -> None:
        """So many tokens came at once, or none. The gap before them counts once: the others came without any."""
        if num_tokens == 0:
            return
        now = time.perf_counter()
        if self._num_tokens == 0:
            self._metrics.ttft.observe(now - self._arrival_s)
            self._metrics.num_waiting.dec()
            self._metrics.num_running.inc()
        else:
            self._metrics.itl.observe(now - self._last_token_s)
        self._last_token_s = now
        self._num_tokens += num_tokens
        self._metrics.generation_tokens.value += num_tokens

    def end(self, reason: str) -> None:
        """reason: a finish reason, ABORT or ERROR."""
        if self._has_ended:
            return
        self._has_ended = True
        (self._metrics.num_running if self._num_tokens else self._metrics.num_waiting).dec()
        self._metrics.count_outcome(reason)
        self._metrics.e2e.observe(time.perf_counter() - self._arrival_s)
        self._metrics.request_generation_tokens.observe(self._num_tokens)


class _GatewayTotals(Collector):
    """Turns what the gateway counts into metrics at every scrape."""

    def __init__(self, model_name: str, totals: Totals) -> None:
        self._model_name = model_name
        self._totals = totals

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        for name, value in self._totals().items():
            family = CounterMetricFamily(f"baton_gateway_{name}", "Since the gateway's start", labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family


class _WorkerMetrics(Collector):
    """Turns the workers' statuses into metrics at every scrape: a dead worker's series end with it."""

    def __init__(self, model_name: str, workers: Workers) -> None:
        self._model_name = model_name
        self._workers = workers

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        workers = self._workers()
        for name, status in workers.items():
            for metric, value in _values_of(status).items():
                family = families.setdefault(
                    metric,
                    GaugeMetricFamily(f"baton_worker_{metric}", "As the worker reports it", labels=["worker", "role"]),
                )
                family.add_metric([name, status.role.value], value)
        yield from families.values()
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of the KV blocks in use where tokens are decoded", labels=["model_name"]
        )
        usage.add_metric([self._model_name], _decode_usage(workers))
        yield usage


def _values_of(status: WorkerStatus) -> dict[str, float]:
    counters = {_NOT_IN_NAMES.sub("_", name): value for name, value in status.counters.items()}
    return counters | {
        "blocks": status.num_blocks,
        "free_blocks": status.num_free_blocks,
        "waiting": status.num_waiting,
        "waiting_tokens": status.num_waiting_tokens,
        "running": status.num_running,
        "max_context": status.max_context,
        "draining": float(status.is_draining),
        "step_running_seconds": status.step_running_s,
    }


def _decode_usage(workers: Mapping[str, WorkerStatus]) -> float:
    decoders = [status for status in workers.values() if status.role is not Role.PREFILL]
    num_blocks = sum(status.num_blocks for status in decoders)
    return 1 - sum(status.num_free_blocks for status in decoders) / num_blocks if num_blocks else 0.0
