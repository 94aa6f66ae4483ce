"""What the state of a child is, and what its death means. Pure: time is given, decisions are returned."""

import signal
from dataclasses import dataclass

from common.supervisor.channel import Event, Listening, PoolsLive, Progress, Ready

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 10.0
STABLE_AFTER_S = 60.0
"""A child that was up for so long starts again without a penalty for earlier deaths."""

MAX_FAILED_STARTS = 5
"""A child that was never ready and died so often will not start the next time either."""

UNUSABLE_EXIT_CODE = 2
"""A service ends with it when what its operator gave (flag, file, model) is unusable: trying again is pointless."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the child again after this delay."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop everything and exit with this code."""

    exit_code: int


@dataclass(slots=True)
class Child:
    """What is known about one child; changed by its events and exits only."""

    name: str
    phase: str = "starting"
    fraction: float | None = None
    is_ready: bool = False
    was_ready: bool = False
    has_live_pools: bool = False
    num_failures: int = 0
    started_at: float = 0.0

    def start(self, now: float) -> None:
        self.phase, self.fraction = "starting", None
        self.is_ready = self.has_live_pools = False
        self.started_at = now

    def apply(self, event: Event) -> None:
        match event:
            case Progress(what, fraction):
                self.phase, self.fraction = what, fraction
            case Listening():
                self.was_ready = True
                self.phase, self.fraction = "waiting for workers", None
            case Ready():
                self.is_ready = self.was_ready = True
                self.phase, self.fraction = "ready", None
            case PoolsLive():
                self.is_ready = self.was_ready = self.has_live_pools = True
                self.phase, self.fraction = "ready", None

    def exit(self, returncode: int, now: float) -> Restart | GiveUp:
        """Note a death and decide what follows. returncode: as in subprocess, negative for a signal."""
        self.is_ready = self.has_live_pools = False
        self.fraction = None
        self.phase = describe_exit(returncode)
        self.num_failures = 1 if now - self.started_at >= STABLE_AFTER_S else self.num_failures + 1
        if not self.was_ready and returncode == UNUSABLE_EXIT_CODE:
            return GiveUp(UNUSABLE_EXIT_CODE)
        if not self.was_ready and self.num_failures >= MAX_FAILED_STARTS:
            return GiveUp(1)
        num_doublings = min(self.num_failures - 1, 16)  # enough for the limit; no end would overflow
        return Restart(min(MAX_DELAY_S, FIRST_DELAY_S * 2**num_doublings))


def describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"
