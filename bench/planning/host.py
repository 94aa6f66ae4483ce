"""Steps that slow each other down. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from bench.planning.clock import Clock


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step.

    alone_s:   with all cores of its host
    shared_s:  with those that are left to it while another worker of the host computes
    """

    alone_s: float
    shared_s: float


@dataclass(slots=True, eq=False)
class _Step:
    time: StepTime
    on_end: Callable[[], None]
    left: float = 1.0
    """Share of the work that is still to be done."""


class Host:
    """The cores of one worker, or of several that lend them to each other.

    A step that runs alone does its work at one pace, and at another one beside the step of another worker. Paces change
    in the moment in which a step begins or ends: as cores are lent, between two tasks.

    Mutable state: the steps under way, how much of them is left, and since when their pace is what it is.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: list[_Step] = []
        self._since_s = 0.0
        self._version = 0

    @property
    def is_computing(self) -> bool:
        return bool(self._steps)

    def run(self, time: StepTime, on_end: Callable[[], None]) -> None:
        """Begin a step; on_end: called when it is done."""
        self._advance()
        self._steps.append(_Step(time, on_end))
        self._await_next_end()

    def _advance(self) -> None:
        passed_s, self._since_s = self._clock.now - self._since_s, self._clock.now
        for step in self._steps:
            step.left -= passed_s / self._pace_s(step)

    def _pace_s(self, step: _Step) -> float:
        """How long all of its work would take as things are."""
        return step.time.alone_s if len(self._steps) == 1 else step.time.shared_s

    def _await_next_end(self) -> None:
        self._version += 1
        if not self._steps:
            return
        version = self._version
        step = min(self._steps, key=self._left_s)
        self._clock.after(self._left_s(step), lambda: self._end(step, version))

    def _left_s(self, step: _Step) -> float:
        return max(0.0, step.left) * self._pace_s(step)

    def _end(self, step: _Step, version: int) -> None:
        """Unless paces have changed meanwhile."""
        if version != self._version:
            return
        self._advance()
        self._steps.remove(step)
        self._await_next_end()
        step.on_end()
