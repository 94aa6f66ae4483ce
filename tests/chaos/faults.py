"""What goes wrong in the chaos tests, and when: drawn from a seed, done to the real processes of `baton serve`."""

import json
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any
from urllib.parse import urlparse

from tests.e2e.stack import Stack, wait_until

MAX_FREEZE_S = 10.0
UNREAD_S = 2.0
"""A client that never reads is there for so long."""
MAX_TAKEN_S = 3.0
TAKING_S = 0.4
"""Sooner than a dead gateway is started again."""


class Faults:
    """Strikes one target after the other, at random, and counts what it did.

    targets:  names of processes, with how often each is struck beside the others
    body:     what clients ask that leave, or never read
    Mutable state: counts; who is frozen, and timers that wake them up.
    """

    def __init__(self, stack: Stack, seed: int, targets: Mapping[str, int], body: dict[str, Any]) -> None:
        self.counts: Counter[str] = Counter()
        self._stack = stack
        self._random = Random(seed)
        self._targets = targets
        self._body = body
        self._frozen: set[int] = set()
        self._timers: list[threading.Timer] = []
        self._sockets: list[socket.socket] = []

    def strike(self) -> None:
        """One of all kinds of faults, to somebody who is there."""
        kinds: Sequence[Callable[[], bool]] = (
            *(self._kill, self._kill, self._kill, self._terminate, self._freeze, self._freeze, self._freeze),
            *(self._leave, self._never_read, self._take_port),
        )
        kind = self._random.choice(kinds)
        if kind():
            self.counts[kind.__name__.strip("_")] += 1

    def heal(self) -> None:
        """Wake up whoever is frozen, and let every client go."""
        for timer in self._timers:
            timer.cancel()
        for pid in list(self._frozen):
            self._thaw(pid)
        for each in self._sockets:
            each.close()

    def _target(self) -> int | None:
        """Somebody's process id; None: it is not there just now."""
        name = self._random.choices(list(self._targets), list(self._targets.values()))[0]
        with suppress(AssertionError):
            return self._stack.pid(name)
        return None

    def _kill(self) -> bool:
        return self._signal(self._target(), signal.SIGKILL)

    def _terminate(self) -> bool:
        return self._signal(self._target(), signal.SIGTERM)

    def _freeze(self) -> bool:
        pid = self._target()
        if not self._signal(pid, signal.SIGSTOP):
            return False
        assert pid is not None
        self._frozen.add(pid)
        self._later(self._random.uniform(1, MAX_FREEZE_S), lambda: self._thaw(pid))
        return True

    def _thaw(self, pid: int) -> None:
        self._frozen.discard(pid)
        self._signal(pid, signal.SIGCONT)

    def _signal(self, pid: int | None, number: signal.Signals) -> bool:
        with suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)
                return True
        return False

    def _take_port(self) -> bool:
        """The gateway dies, and for a while somebody else listens where it did."""
        url = urlparse(self._stack.url)
        taker = socket.socket()
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(AssertionError, ProcessLookupError):  # it is not there just now
            os.kill(self._stack.pid("gateway"), signal.SIGKILL)
        try:
            wait_until(lambda: _binds(taker, url.hostname, url.port), TAKING_S)
        except AssertionError:  # it was back sooner
            taker.close()
            return False
        taker.listen()
        self._sockets.append(taker)
        self._later(self._random.uniform(1, MAX_TAKEN_S), taker.close)
        return True

    def _leave(self) -> bool:
        """A client that goes in mid-stream."""
        return self._ask(self._random.uniform(0, 1))

    def _never_read(self) -> bool:
        return self._ask(UNREAD_S)

    def _ask(self, closed_after_s: float) -> bool:
        """Send a request, read nothing, and close the connection after a while."""
        url = urlparse(self._stack.url)
        body = json.dumps({**self._body, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(body)}\r\n"
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the smallest there is: the gateway must wait
        try:
            client.connect((url.hostname, url.port))
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        except OSError:  # the gateway is not there just now
            client.close()
            return False
        self._sockets.append(client)
        self._later(closed_after_s, client.close)
        return True

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, action)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()


def _binds(taker: socket.socket, host: str | None, port: int | None) -> bool:
    try:
        taker.bind((host, port))
    except OSError:
        return False
    return True
