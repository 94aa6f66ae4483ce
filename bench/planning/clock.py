"""Virtual time: what is to happen, in order."""

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    """Mutable state: the time, in seconds, and a heap of what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = count()
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []

    def at(self, when_s: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._agenda, (when_s, next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        self.at(self.now + delay_s, action)

    def every(self, period_s: float, action: Callable[[], object]) -> None:
        def again() -> None:
            action()
            self.after(period_s, again)

        self.after(period_s, again)

    def run_until(self, is_done: Callable[[], bool], limit_s: float, describe: Callable[[], object]) -> None:
        """Let time pass. Fails with a description when it is not done by then."""
        while not is_done():
            assert self.now <= limit_s, f"not done after {limit_s} virtual seconds: {describe()}"
            self.now, _, action = heapq.heappop(self._agenda)
            action()

    def run_for(self, duration_s: float) -> None:
        end_s = self.now + duration_s
        while self._agenda and self._agenda[0][0] <= end_s:
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        self.now = end_s
