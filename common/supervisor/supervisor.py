"""Starts children, keeps them running, stops them. One thread; it blocks on channels and signals only."""

import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import WireError
from common.supervisor.channel import Event, Listening
from common.supervisor.display import Display, banner, death_report
from common.supervisor.plan import ChildPlan, child_environ
from common.supervisor.policy import Child, GiveUp, Restart
from common.supervisor.process import ChildProcess
from common.supervisor.signals import STOP_SIGNALS, read_signals, signal_socket

STOP_GRACE_S = 4.0
"""From SIGTERM to SIGKILL. All is gone within five seconds."""

NO_PROCESS_EXIT_CODE = 1
"""Of a child for which the system had no room: as if it had ended at once."""

_NUM_LAST_LINES = 15


@dataclass(slots=True)
class _Slot:
    """One planned child: what is known of it; its process while there is one, else when the next one starts.

    url: where it answered HTTP last; a restart keeps the port, which the first start may have left open
    """

    plan: ChildPlan
    child: Child
    log_path: Path
    process: ChildProcess | None = None
    start_at: float = 0.0
    url: str | None = None


class Supervisor:
    """Runs children until a stop signal (exit code 0) or until one of them can never start (its exit code).

    Used in the main thread, whose signals are its own while it runs.
    has_api_key: the first request shown must carry a key
    """

    def __init__(self, plans: Sequence[ChildPlan], display: Display, log_dir: Path, has_api_key: bool) -> None:
        self._slots = [_Slot(plan, Child(plan.name), log_dir / f"{plan.name}.log") for plan in plans]
        self._display = display
        self._log_dir = log_dir
        self._has_api_key = has_api_key
        self._selector = selectors.DefaultSelector()
        self._is_announced = False
        self._num_stop_signals = 0
        self._exit_code: int | None = None

    def run(self) -> int:
        """Block until all children are gone; return the exit code."""
        with signal_socket() as wakeup, self._selector:
            self._selector.register(wakeup, selectors.EVENT_READ)
            try:
                exit_code = self._supervise(wakeup)
                self._stop(wakeup)
            finally:
                self._kill_all()
                self._display.close()
        return exit_code

    def _supervise(self, wakeup: socket.socket) -> int:
        while self._exit_code is None:
            self._start_due(time.monotonic())
            self._show_progress()
            self._wait(wakeup, min((slot.start_at for slot in self._slots if slot.process is None), default=None))
            for slot, returncode in self._reap():
                self._on_exit(slot, returncode)
        return self._exit_code

    def _start_due(self, now: float) -> None:
        for slot in self._slots:
            if slot.process is None and now >= slot.start_at:
                port = () if slot.url is None else (f"--port={urlsplit(slot.url).port}",)
                environ = child_environ(dict(os.environ), slot.plan.secrets)
                slot.child.start(now)
                try:
                    slot.process = ChildProcess((*slot.plan.argv, *port), environ, slot.log_path)
                except OSError as error:
                    then = self._decide(slot, NO_PROCESS_EXIT_CODE)
                    self._display.say(f"{slot.plan.name} cannot be started: {error}; {then}.")
                else:
                    self._selector.register(slot.process.channel, selectors.EVENT_READ, slot)

    def _wait(self, wakeup: socket.socket, until: float | None) -> None:
        """Block until a child reports, a signal comes or the time is there; take in what came."""
        timeout_s = None if until is None else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is wakeup:
                self._num_stop_signals += sum(number in STOP_SIGNALS for number in read_signals(wakeup))
            else:
                self._read(key.data)
        if self._num_stop_signals and self._exit_code is None:
            self._exit_code = 0

    def _read(self, slot: _Slot) -> bool:
        """Take in what the child reports. True: something was taken in, and there may be more."""
        assert slot.process is not None
        try:
            events = slot.process.read_events()
        except WireError as error:
            self._display.say(f"{slot.plan.name}: {error}")
            slot.process.terminate()
            events = None
        if events is None:
            self._close_channel(slot.process)
            return False
        for event in events:
            self._on_event(slot, event)
        return bool(events)

    def _on_event(self, slot: _Slot, event: Event) -> None:
        was_ready = slot.child.is_ready
        slot.child.apply(event)
        if isinstance(event, Listening):
            slot.url = event.url
        if self._is_announced and slot.child.is_ready and not was_ready:
            self._display.say(f"{slot.plan.name} is ready again.")

    def _reap(self) -> list[tuple[_Slot, int]]:
        """Children that have ended, and how; all that they reported before is taken in first."""
        ended: list[tuple[_Slot, int]] = []
        for slot in self._slots:
            returncode = None if slot.process is None else slot.process.poll()
            if slot.process is None or returncode is None:
                continue
            while slot.process.is_open and self._read(slot):
                pass
            ended.append((slot, returncode))
        return ended

    def _decide(self, slot: _Slot, returncode: int) -> str:
        """What follows from an end of the child, in words."""
        now = time.monotonic()
        match slot.child.exit(returncode, now):
            case GiveUp(exit_code):
                self._exit_code = exit_code
                return "stopping everything"
            case Restart(delay_s):
                slot.start_at = now + delay_s
                return f"starting it again in {delay_s:g} s"

    def _on_exit(self, slot: _Slot, returncode: int) -> None:
        assert slot.process is not None
        then = self._decide(slot, returncode)
        last_lines = slot.process.last_lines(_NUM_LAST_LINES)
        self._display.say(death_report(slot.plan.name, returncode, last_lines, slot.log_path, then))
        self._forget(slot)

    def _show_progress(self) -> None:
        if self._is_announced:
            return
        children = [slot.child for slot in self._slots]
        self._display.show(children)
        url = next((slot.url for slot in self._slots if slot.url is not None), None)
        if url and all(child.is_ready for child in children) and any(child.has_live_pools for child in children):
            self._is_announced = True
            self._display.clear()
            self._display.say(banner(url, self._has_api_key, self._log_dir))

    def _stop(self, wakeup: socket.socket) -> None:
        """SIGTERM to all; wait until they are gone, the grace is over or a second stop signal says: now."""
        self._display.clear()
        self._display.say("Stopping.")
        deadline = time.monotonic() + STOP_GRACE_S
        for slot in self._slots:
            if slot.process is not None:
                slot.process.terminate()
        while any(slot.process for slot in self._slots) and time.monotonic() < deadline and self._num_stop_signals < 2:
            self._wait(wakeup, deadline)
            for slot, _ in self._reap():
                self._forget(slot)

    def _kill_all(self) -> None:
        for slot in self._slots:
            if slot.process is not None:
                slot.process.kill()
                self._forget(slot)

    def _forget(self, slot: _Slot) -> None:
        assert slot.process is not None
        if slot.process.is_open:
            self._close_channel(slot.process)
        slot.process = None

    def _close_channel(self, process: ChildProcess) -> None:
        self._selector.unregister(process.channel)
        process.channel.close()
