"""ZeroMQ sockets as Baton uses them: options, binding, and connections that say when they break."""

import math
import socket as sockets
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from enum import Enum, auto

import zmq
from zmq.utils.monitor import recv_monitor_message

from common.errors import ConfigError
from common.machine import max_descriptors
from common.own_host import own_host

HEARTBEAT_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 5_000
"""A host that vanished breaks the connection after this; ZeroMQ's own thread answers, whatever Python is busy with."""
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1_000
MAX_CONNECTIONS = 1_000
MAX_SOCKETS = 4 * MAX_CONNECTIONS
"""Of a context. A connection takes three: its own, and both ends of its monitor."""
DESCRIPTORS_PER_CONNECTION = 5
"""One a socket, and one for each direction of a TCP link."""


def max_connections(other_descriptors: int = 0) -> int:
    """How many a thread keeps at most, whatever its peers ask for: they take half of this process's descriptors.

    other_descriptors: that each takes beside its sockets
    """
    return min(MAX_CONNECTIONS, max_descriptors() // (2 * (DESCRIPTORS_PER_CONNECTION + other_descriptors)))


class ConnectionChange(Enum):
    """What a monitor reports.

    UP:      the handshake is done, messages flow
    BROKEN:  it was up; what was in flight may be lost
    FAILED:  it never came up: refused, unknown host or not our protocol; ZeroMQ goes on trying
    """

    UP = auto()
    BROKEN = auto()
    FAILED = auto()


class Connection:
    """One outgoing socket to one address. Belongs to the thread that made it.

    Nothing can be sent, and so nothing is queued for whoever comes next, while it is not up.

    socket, monitor: poll both; read the monitor with `changes`.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str, max_queued: int) -> None:
        """max_queued: messages in ZeroMQ's own queue, per direction.

        Raises: ConfigError when the address is not one that ZeroMQ knows, or there are no sockets left.
        """
        self.address = address
        self.is_up = False
        self._is_waiting = False
        with ExitStack() as undo:
            try:
                self.socket = context.socket(kind)
                undo.callback(self.socket.close, linger=0)
                set_options(self.socket, max_queued)
                _set_family(self.socket, address)
                self.socket.setsockopt(zmq.IMMEDIATE, 1)
                self.monitor = self.socket.get_monitor_socket(_CHANGES)
                undo.callback(self.monitor.close, linger=0)
                self.monitor.linger = 0
                self.socket.connect(address)
            except zmq.ZMQError as error:
                raise ConfigError(f"cannot connect to {address!r}: {error}") from error
            undo.pop_all()

    def changes(self) -> Iterator[ConnectionChange]:
        """What happened since the last call. Never blocks."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            self._is_waiting = event == zmq.EVENT_CONNECT_RETRIED
            if event in _ATTEMPTS:
                continue
            was_up = self.is_up
            self.is_up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self.is_up:
                yield ConnectionChange.UP
            elif was_up:
                yield ConnectionChange.BROKEN
            else:
                yield ConnectionChange.FAILED

    def retry(self) -> None:
        """Somebody is known to be there: connect now if ZeroMQ waits, after attempts that failed, to try again."""
        if self._is_waiting and not self.monitor.poll(0):
            self._is_waiting = False
            self.socket.disconnect(self.address)
            self.socket.connect(self.address)

    def close(self, linger_s: float = 0.0) -> None:
        """Drop what was not sent yet. With linger_s, ZeroMQ goes on sending while the context is terminated."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger=math.ceil(linger_s * 1000))


_ATTEMPTS = (zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_CONNECTED)
"""One is under way: it is in progress, or waits for the handshake."""
_CHANGES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_CONNECT_DELAYED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Wakeup:
    """Ends another thread's poll. `set` from any thread; the owner polls `fileno` and then calls `clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = sockets.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.fileno = self._reader.fileno()
        self._lock = threading.Lock()
        self._is_set = False
        self._is_closed = False

    def set(self) -> None:
        with self._lock:
            if not self._is_set and not self._is_closed:
                self._is_set = True
                self._writer.send(b"\0")

    def clear(self) -> None:
        """What was asked for before a `set` must be looked at after this."""
        with self._lock:
            if self._is_set:
                self._is_set = False
                self._reader.recv(1)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._reader.close()
            self._writer.close()


def has_event(socket: "zmq.Socket[bytes]", event: zmq.PollEvent) -> bool:
    """Whether it can be read from (POLLIN) or written to (POLLOUT) now.

    Its `poll` would build a poller to say so, and `&` of an enum's flags takes 2 µs.
    """
    return bool(int(socket.getsockopt(zmq.EVENTS)) & int(event))


def set_options(socket: "zmq.Socket[bytes]", max_queued: int) -> None:
    """What every socket has: bounded queues, no lingering, and death of the other host noticed."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, max_queued)
    socket.setsockopt(zmq.RCVHWM, max_queued)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 5)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)


def bind(socket: "zmq.Socket[bytes]", endpoint: str, advertise_host: str) -> str:
    """Bind, and return the address by which others reach the socket.

    endpoint:        `tcp://host:port` or `ipc://path`; `*` for any host, port or path
    advertise_host:  put into the returned address; "": the bound host, or this machine's own if that is a wildcard
    Raises: ConfigError when it cannot be bound.
    """
    _set_family(socket, endpoint)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen on {endpoint!r}: {error}") from error
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if not bound.startswith("tcp://"):
        return bound
    host, _, port = bound.removeprefix("tcp://").rpartition(":")
    if host in ("0.0.0.0", "[::]"):
        host = own_host()
    return f"tcp://{advertise_host or host}:{port}"


def _set_family(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """ZeroMQ takes IPv6 addresses only where it is told to, and then reports IPv4 ones as mapped."""
    socket.setsockopt(zmq.IPV6, int(endpoint.startswith("tcp://[")))
