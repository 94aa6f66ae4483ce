"""One process of the simulated ring: it runs, is frozen, or has died."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from bench.planning.clock import Clock
from common.ids import PeerId

Action = Callable[[], object]


class Process:
    """Whatever happens in a process goes through here, so that a frozen one finds it later and a dead one never.

    name:  of the service; peer: of this incarnation of it
    Mutable state: whether it is alive; until when it is frozen, and what waits for it then; what it is to do next.
    """

    def __init__(self, clock: Clock, name: str, peer: PeerId) -> None:
        self.clock = clock
        self.name = name
        self.peer = peer
        self.is_alive = True
        self.num_events = 0
        self._frozen_until_s = 0.0
        self._held: list[tuple[bool, Action]] = []
        self._next: deque[Action] = deque()
        self._is_running = True
        self._on_event: list[tuple[int, Action]] = []

    def begin(self, action: Action) -> None:
        """It is built: do this, and what its threads were to do before it was."""
        self._is_running = False
        self.enter(action)

    @property
    def is_frozen(self) -> bool:
        return self.clock.now < self._frozen_until_s

    def enter(self, action: Action, *, is_timer: bool = False) -> None:
        """Something happens here: now, or once the process is not frozen any more. All that follows from it as well."""
        if not self.is_alive:
            return
        if self.is_frozen:
            self._held.append((is_timer, action))
            return
        self._next.append(action)
        if not self._is_running:
            self._run()

    def soon(self, action: Action) -> None:
        """Another thread of the process is to do this at once."""
        self.enter(action)

    def at(self, when_s: float, action: Action) -> None:
        self.clock.at(when_s, lambda: self.enter(action, is_timer=True))

    def after(self, delay_s: float, action: Action) -> None:
        self.clock.after(delay_s, lambda: self.enter(action, is_timer=True))

    def _run(self) -> None:
        self._is_running = True
        self.num_events += 1
        try:
            while self._next and self.is_alive:
                self._next.popleft()()
        finally:
            self._is_running = False
        if self.is_alive:
            self.check()
        if self._on_event:
            self._fire()

    def check(self) -> None:
        """Assert what must be true of this process between two events."""

    def on_event(self, count: int, action: Action) -> None:
        """Do this right after so many more events of this process; 0: now."""
        if count == 0:
            action()
        else:
            self._on_event.append((self.num_events + count, action))

    def _fire(self) -> None:
        due = [action for number, action in self._on_event if number <= self.num_events]
        self._on_event = [(number, action) for number, action in self._on_event if number > self.num_events]
        for action in due:
            action()

    def freeze(self, duration_s: float, *, timers_first: bool) -> None:
        """It neither computes nor listens for a while; then it finds all that came meanwhile.

        timers_first: whether its clocks tell it how late it is before it looks at what has come
        """
        self._frozen_until_s = max(self._frozen_until_s, self.clock.now + duration_s)
        self.clock.at(self._frozen_until_s, lambda: self._thaw(timers_first))

    def _thaw(self, timers_first: bool) -> None:
        if self.is_frozen:
            return
        held, self._held = self._held, []
        if timers_first:
            held.sort(key=lambda each: not each[0])
        for is_timer, action in held:
            self.enter(action, is_timer=is_timer)

    def die(self) -> None:
        self.is_alive = False
        self._held.clear()
        self._next.clear()
