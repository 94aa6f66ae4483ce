"""ZeroMQ's sockets and the threads that own them, on virtual time: what is built on them runs here as it is.

As much of ZeroMQ as Baton uses: PUSH to PULL, DEALER to ROUTER, monitors and pollers. A thread is a function that is
called again whenever its poll would return.
"""

from __future__ import annotations

import errno
import math
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq

from common.links import Links
from common.wire import Buffer
from kvtransfer.puller import KVPuller
from tests.sim.process import Process

if TYPE_CHECKING:
    from tests.sim.network import Network

POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
EVENTS = int(zmq.EVENTS)
_owner: list[tuple[Process, Network]] = []


@contextmanager
def owned_by(process: Process, network: Network) -> Iterator[None]:
    """What is built meanwhile has its threads and sockets in this process."""
    _owner.append((process, network))
    try:
        yield
    finally:
        _owner.pop()


class Blocked(Exception):
    """A poll with nothing to return. timeout_ms: after which it would return all the same; None: never."""

    def __init__(self, timeout_ms: float | None) -> None:
        self.timeout_ms = timeout_ms


class SimThread:
    """Stands for `SocketThread`."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.process, network = _owner[-1]
        self.context = Context(self, network)
        self.wakeup = Wakeup(self)
        self.is_closing = False
        self._work = work
        self._turn: Callable[[], None] | None = None
        self._is_scheduled = False
        self._due_s = math.inf

    @property
    def is_alive(self) -> bool:
        return self._turn is not None and not self.is_closing and self.process.is_alive

    def start(self) -> None:
        self._turn = _turn_of(self._work, self.wakeup)
        self.wake()

    def wake(self) -> None:
        """Something may be ready."""
        if self._turn is not None and not self._is_scheduled and not self.is_closing:
            self._is_scheduled = True
            self.process.soon(self._run)

    def call(self) -> None:
        """Another thread of the process has something for it. It takes a moment to wake up, and then looks."""
        delay_s = self.context.network.draw_wake_up_s()
        self.process.after(delay_s, self.wake)

    def _run(self) -> None:
        self._is_scheduled = False
        if self._turn is None or self.is_closing:
            return
        try:
            while True:
                self._turn()
        except Blocked as blocked:
            if blocked.timeout_ms is not None:
                self._wait(blocked.timeout_ms / 1000)

    def _wait(self, timeout_s: float) -> None:
        now = self.process.clock.now
        if now < self._due_s <= now + timeout_s:
            return
        self._due_s = now + timeout_s
        self.process.after(timeout_s, self.wake)

    def close(self) -> None:
        """At once: what could be sent by now is on its way."""
        if not self.is_closing:
            self._run()
        self.is_closing = True
        for socket in self.context.sockets:
            socket.close()


def _turn_of(work: Callable[[], None], wakeup: Wakeup) -> Callable[[], None]:
    """What a thread repeats. `KVServer`'s work begins with nothing that could not be done again."""
    match getattr(work, "__self__", None):
        case Links() as links:
            links._poller.register(wakeup.fileno, zmq.POLLIN)  # pyright: ignore[reportArgumentType]
            links._poller.register(links._inbox, zmq.POLLIN)
            return links._turn
        case KVPuller() as puller:
            puller._poller.register(wakeup.fileno, zmq.POLLIN)  # pyright: ignore[reportArgumentType]
            return puller._turn
        case _:
            return work


class Wakeup:
    """Stands for `link_socket.Wakeup`; polled as it is."""

    def __init__(self, thread: SimThread) -> None:
        self._thread = thread
        self.fileno = self
        self.ready = 0

    def set(self) -> None:
        if not self.ready:
            self.ready = POLLIN
            self._thread.call()

    def clear(self) -> None:
        self.ready = 0


class Poller:
    """Stands for `zmq.Poller`. Mutable state: what is polled for what, and when it returned without any of it."""

    def __init__(self) -> None:
        self._flags: dict[Any, int] = {}
        self._came_s = -1.0

    def __contains__(self, key: object) -> bool:
        return key in self._flags

    def register(self, key: Any, flags: int) -> None:
        self._flags[key] = int(flags)

    def unregister(self, key: Any) -> None:
        del self._flags[key]

    def poll(self, timeout_ms: float | None = None) -> list[tuple[Any, int]]:
        ready = [(key, found) for key, flags in self._flags.items() if (found := key.ready & flags)]
        if not ready:
            if timeout_ms != 0:
                raise Blocked(timeout_ms)
            if self._came_s == time.monotonic():  # time passes while a thread turns, if only a little
                raise Blocked(1)
            self._came_s = time.monotonic()
        return ready


class Context:
    """Stands for `zmq.Context`."""

    def __init__(self, thread: SimThread, network: Network) -> None:
        self.thread = thread
        self.network = network
        self.sockets: list[Socket] = []

    def socket(self, kind: int) -> Socket:
        socket = (Listener if kind in (zmq.PULL, zmq.ROUTER) else Connector)(self, kind == zmq.ROUTER)
        self.sockets.append(socket)
        return socket


@dataclass(frozen=True, slots=True)
class Frame:
    """Stands for `zmq.Frame`."""

    buffer: Buffer


class Socket:
    """Of a thread. Mutable state: frames that have arrived, and whether it is closed."""

    def __init__(self, context: Context, routes: bool) -> None:
        self.network = context.network
        self.process = context.thread.process
        self.thread = context.thread
        self.routes = routes
        self.is_closed = False
        self._arrived: deque[list[Buffer]] = deque()

    @property
    def ready(self) -> int:
        return POLLIN if self._arrived else 0

    def setsockopt(self, option: int, value: object) -> None:
        """Times and sizes are the network's own."""

    def getsockopt(self, option: int) -> int:
        assert int(option) == EVENTS
        return self.ready

    def take(self, identity: bytes, frames: list[Buffer]) -> None:
        """A message arrives."""
        if not self.is_closed:
            self._arrived.append([identity, *frames] if self.routes else frames)
            self.thread.wake()

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[Any]:
        if not self._arrived:
            raise zmq.Again
        frames = self._arrived.popleft()
        return frames if copy else [Frame(frame) for frame in frames]

    def close(self, linger: int | None = None) -> None:
        self.is_closed = True


class Listener(Socket):
    """PULL or ROUTER."""

    endpoint = ""

    def bind(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.network.bind(self)

    def getsockopt_string(self, option: int) -> str:
        return self.endpoint

    def send_multipart(self, frames: Sequence[Buffer], flags: int = 0, copy: bool = True) -> None:
        connector = self.network.connector(bytes(frames[0]))
        if connector is None or connector.listener is not self:
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        self.network.carry(self.process, connector.back, connector, [*frames[1:]])

    def close(self, linger: int | None = None) -> None:
        super().close()
        self.network.unbind(self)


@dataclass(slots=True)
class Lane:
    """One direction of a connection. Mutable state: when its latest message arrives; which connection it is by now,
    and until when messages of the one before still arrive.
    """

    identity: bytes
    last_arrival_s: float = 0.0
    epoch: int = 0
    cut_s: float = 0.0


class Connector(Socket):
    """PUSH or DEALER: one connection to one address, made again and again.

    Mutable state: listener, at the other end while there is a connection; is_up: as far as this end knows.
    """

    def __init__(self, context: Context, routes: bool) -> None:
        super().__init__(context, routes)
        identity = b"%d" % self.network.next_number()
        self.out, self.back = Lane(identity), Lane(identity)
        self.address = ""
        self.listener: Listener | None = None
        self.is_up = False
        self._monitor = Monitor()

    @property
    def ready(self) -> int:
        return (POLLIN if self._arrived else 0) | (POLLOUT if self.can_send else 0)

    @property
    def can_send(self) -> bool:
        return self.is_up and not (self.listener and self.network.is_stuffed(self.process, self.listener.process))

    def get_monitor_socket(self, events: int) -> Monitor:
        return self._monitor

    def disable_monitor(self) -> None:
        self._monitor.events.clear()

    def connect(self, address: str) -> None:
        self.address = address
        self.network.connect(self)

    def disconnect(self, address: str) -> None:
        """Give up an attempt to connect; `connect` begins anew."""
        assert address == self.address
        assert not self.is_up, "what was sent would be lost"
        self.network.disconnect(self)

    def send_multipart(self, frames: Sequence[Buffer], flags: int = 0) -> None:
        if not self.can_send:
            raise zmq.Again
        if self.listener:  # else it is broken, and we do not know yet
            self.network.carry(self.process, self.out, self.listener, [*frames])

    def come_up(self, listener: Listener) -> None:
        self.listener, self.is_up = listener, True
        self.report(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def report(self, event: int) -> None:
        """Tell the owner what became of the connection."""
        if not self.is_closed:
            self._monitor.push(event)
            self.thread.wake()

    def close(self, linger: int | None = None) -> None:
        super().close()
        self.network.disconnect(self)


class Monitor:
    """Stands for the socket of a monitor. Mutable state: events that were not read."""

    linger = 0

    def __init__(self) -> None:
        self.events: deque[list[bytes]] = deque()

    @property
    def ready(self) -> int:
        return POLLIN if self.events else 0

    def push(self, event: int) -> None:
        self.events.append([struct.pack("=hi", event, 0), b""])

    def poll(self, timeout_ms: float) -> int:
        return self.ready

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        return self.events.popleft()

    def close(self, linger: int | None = None) -> None:
        self.events.clear()
