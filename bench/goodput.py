"""The search for the highest rate at which enough requests meet their objectives. Pure."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """rate: requests/s.  attainment: share of its requests that met the objectives."""

    rate: float
    attainment: float


class RateSearch:
    """Doubles or halves the rate until a hit and a miss bracket the answer, then bisects their ratio.

    wanted:     attainment of a hit
    tolerance:  the search ends when miss / hit - 1 is at most this
    Mutable state: the probes so far. Each is taken as it comes, though near the answer it may go either way: more
    requests in a probe make it surer.
    """

    def __init__(self, start_rate: float, *, wanted: float, tolerance: float, max_probes: int) -> None:
        assert start_rate > 0
        self._start_rate = start_rate
        self._wanted = wanted
        self._tolerance = tolerance
        self._max_probes = max_probes
        self._is_given_up = False
        self.probes: list[Probe] = []

    @property
    def hit(self) -> float:
        """The highest rate that attained what is wanted; 0 if none did."""
        miss = self.miss or math.inf
        return max((p.rate for p in self.probes if p.attainment >= self._wanted and p.rate < miss), default=0.0)

    @property
    def miss(self) -> float | None:
        """The lowest rate that did not."""
        return min((p.rate for p in self.probes if p.attainment < self._wanted), default=None)

    def next_rate(self) -> float | None:
        """What to probe next; None when the answer is known as well as it will be."""
        if self._is_given_up or len(self.probes) >= self._max_probes:
            return None
        hit, miss = self.hit, self.miss
        if miss is None:
            return hit * 2 or self._start_rate
        if not hit:
            return miss / 2
        return None if miss / hit <= 1 + self._tolerance else math.sqrt(hit * miss)

    def record(self, rate: float, attainment: float) -> None:
        """The outcome of a probe at the rate that was next."""
        self.probes.append(Probe(rate, attainment))

    def give_up(self) -> None:
        """Probe no more."""
        self._is_given_up = True
