"""How a time grows with a size. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

_UNSTEADY = 1.25
"""The median over the fastest; on a quiet machine it is below 1.1."""


@dataclass(frozen=True, slots=True)
class Point:
    """size: what grows;  times_s: of each repeat.

    num_sequences, num_tokens, num_pairs: of the step, see `StepPlan`
    """

    size: int
    num_sequences: int
    num_tokens: int
    num_pairs: int
    times_s: Sequence[float]

    @property
    def median_s(self) -> float:
        return median(self.times_s)

    @property
    def is_unsteady(self) -> bool:
        """Something else may have run meanwhile."""
        return self.median_s > _UNSTEADY * min(self.times_s)


@dataclass(frozen=True, slots=True)
class Curve:
    """title: what is measured;  size_name: of what grows."""

    name: str
    title: str
    size_name: str
    points: Sequence[Point]

    def exponents(self) -> list[float]:
        """Between each point and the next, e where time grows as size**e: 0 is constant, 1 proportional."""
        return [
            math.log(after.median_s / before.median_s) / math.log(after.size / before.size)
            for before, after in pairwise(self.points)
        ]
