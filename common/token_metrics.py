"""Metrics that are touched for every token. prometheus_client's take a lock for each of their numbers."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Counter(Collector):
    """Counted and scraped by one thread. Mutable: value, which only rises.

    labels: of its series
    """

    def __init__(self, name: str, help: str, labels: Mapping[str, str]) -> None:
        self.value = 0
        self._name = name
        self._help = help
        self._labels = labels

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self.value)
        yield family


class Histogram(Collector):
    """Observed and scraped by one thread.

    labels:  of its series
    bounds:  rising; a sample belongs to the first that is not below it
    Mutable state: the number of samples of each bound, and of those above the last; their sum.
    """

    def __init__(self, name: str, help: str, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help
        self._labels = labels
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(self._name, self._help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family
