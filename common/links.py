"""Control messages between services: one bound inbox, one outgoing socket per peer, loss as an event.

A link is FIFO and never silently loses anything: what ZeroMQ drops when a connection breaks shows as a gap in
the sequence numbers, and a gap, a broken connection and another incarnation are all one event, `LinkLost`.

1. `connect` (a configured address) or a status from an unknown peer opens a connection to that address.
2. Statuses go there at once and every STATUS_S. They are addressed to nobody until a status of the peer at that
   address has come back, and again after the connection broke or while the peer is silent: it may be another
   incarnation by then. A status from an address to which our connection is down has us connect at once.
3. Messages are numbered when they are handed to ZeroMQ. The receiver drops what it saw already and what is
   addressed to another incarnation, and answers a gap with `LinkBroken`.
4. When a connection breaks, what was under way is void on both sides (see `LinkNumbers.void_connection`).

One thread owns all sockets. Statuses are made and sent there, so a long compute step never looks like death.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable

import zmq

from common.errors import ConfigError, WireError
from common.ids import PeerId
from common.link_counters import LinkCounters
from common.link_in import LinkReceiver
from common.link_out import MAX_OUTBOX, MakeStatus, OutgoingLink
from common.link_socket import Connection, ConnectionChange, bind, has_event, max_connections, set_options
from common.service import STATUS_S, LinkEvent
from common.socket_thread import SocketThread
from common.wire import MAX_HEADER_BYTES, Control, decode

logger = logging.getLogger(__name__)

FORGET_S = 60.0
"""A peer that was not configured, whose connection is down and that was silent for so long loses its socket."""
MAX_FORGOTTEN = 1024
"""Peers without a socket whose sequence numbers are kept, in case they come back."""
INBOX_BATCH = 256
MAX_INBOX = 1000


class Links:
    """All links of one service.

    deliver and make_status are called in the I/O thread, with nothing locked; they must not block.
    make_status gets the peer, or None before it is known.
    """

    def __init__(
        self,
        me: PeerId,
        bind_to: str,
        advertise_host: str | None,
        make_status: MakeStatus,
        deliver: Callable[[LinkEvent], None],
        max_outbox: int = MAX_OUTBOX,
    ) -> None:
        """max_outbox: messages that wait for one peer, and are never more if all goes well.

        Raises: ConfigError when the inbox cannot be bound.
        """
        self._me = me
        self._make_status = make_status
        self._max_outbox = max_outbox
        self._counters = LinkCounters()
        self._thread = SocketThread(f"links {me}", self._run)
        self._inbox = self._thread.context.socket(zmq.PULL)
        set_options(self._inbox, MAX_INBOX)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        try:
            self.address = bind(self._inbox, bind_to, advertise_host or "")
        except ConfigError:
            self._thread.close()
            raise
        self._max_links = max_connections()
        self._commands: deque[Callable[[], None]] = deque()
        # The I/O thread's: nobody else changes these. `send` looks up peers.
        self._receiver = LinkReceiver(me, self._counters, deliver, self._admit)
        self._links: dict[str, OutgoingLink] = {}
        self._poller = zmq.Poller()
        self._next_status_s = time.monotonic()
        self._close_by_s = 0.0

    def start(self) -> None:
        """Begin to send and deliver. Until then the inbox is bound, and whoever finds it waits."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False after `close`, and when the I/O thread died of a bug of ours: nothing moves any more."""
        return self._thread.is_alive

    def connect(self, address: str) -> None:
        """Introduce ourselves at this address, for as long as it takes. Any thread; idempotent."""
        self._command(lambda: self._configure(address))

    def disconnect(self, address: str) -> None:
        """Stop trying once nobody is there any more. Any thread; idempotent."""
        self._command(lambda: self._unconfigure(address))

    def send(self, peer_id: PeerId, message: Control) -> bool:
        """Queue a message. Any thread; never blocks. False: the peer is unknown, or does not read."""
        peer = self._receiver.peers.get(peer_id)
        if peer is None or peer.link is None or len(peer.outbox) >= self._max_outbox:
            return False
        peer.outbox.append(message)
        self._thread.wakeup.set()
        return True

    def poke_status(self) -> None:
        """Send a status to every peer now. Any thread."""
        self._command(self._want_statuses)

    def counters(self) -> dict[str, float]:
        """Totals since start, for /metrics. Any thread."""
        return self._counters.totals()

    def close(self, flush_s: float = 0.0) -> None:
        """Stop the I/O thread, after at most flush_s seconds in which it sends what waits; the rest is dropped.

        After it nothing is delivered. Idempotent.
        """
        self._close_by_s = time.monotonic() + flush_s
        self._thread.close()

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._thread.wakeup.set()

    # All below runs in the I/O thread.

    def _run(self) -> None:
        self._poller.register(self._thread.wakeup.fileno, zmq.POLLIN)
        self._poller.register(self._inbox, zmq.POLLIN)
        try:
            while not self._may_close():
                self._turn()
        finally:
            self._close_connections()

    def _close_connections(self) -> None:
        """What was handed to ZeroMQ may still be sent, for as long as `close` allows."""
        linger_s = max(0.0, self._close_by_s - time.monotonic())
        for link in self._links.values():
            link.connection.close(linger_s if link.connection.is_up else 0.0)

    def _may_close(self) -> bool:
        if not self._thread.is_closing:
            return False
        is_unsent = any(link.peer and link.peer.outbox for link in self._links.values())
        return not is_unsent or time.monotonic() >= self._close_by_s

    def _turn(self) -> None:
        next_s = min(self._next_status_s, self._close_by_s) if self._thread.is_closing else self._next_status_s
        timeout_s = max(0.0, next_s - time.monotonic())
        ready = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        if self._thread.wakeup.fileno in ready:
            self._thread.wakeup.clear()
        while self._commands:
            self._commands.popleft()()
        for link in list(self._links.values()):
            if link.connection.monitor in ready:
                self._read_monitor(link)
        if self._inbox in ready:
            self._read_inbox()
        if time.monotonic() >= self._next_status_s:
            self._next_status_s = time.monotonic() + STATUS_S
            self._want_statuses()
            self._forget_gone()
        self._flush()

    def _configure(self, address: str) -> None:
        try:
            self._link_at(address).is_configured = True
        except ConfigError as error:
            logger.error("%s", error)

    def _unconfigure(self, address: str) -> None:
        if link := self._links.get(address):
            link.is_configured = False

    def _admit(self, address: str) -> OutgoingLink | None:
        """The link to where a peer says that it lives; None when that is no address, or there are enough links.

        So peers can neither use up sockets nor keep the operator's own addresses out.
        """
        if address not in self._links and len(self._links) >= self._max_links:
            self._counters.refuse("surplus", f"a status from {address}, with {len(self._links)} links already")
            return None
        try:
            return self._link_at(address)
        except ConfigError as error:
            self._counters.refuse("malformed", f"a status: {error}")
            return None

    def _link_at(self, address: str) -> OutgoingLink:
        """Raises: ConfigError when that is not an address, or there are no sockets left."""
        if address in self._links:
            return self._links[address]
        link = OutgoingLink(self._thread.context, self._me, address)
        self._links[address] = link
        self._poller.register(link.connection.monitor, zmq.POLLIN)
        return link

    def _want_statuses(self) -> None:
        for link in self._links.values():
            link.wants_status = True

    def _flush(self) -> None:
        """Send what can be sent; let the poller tell when the rest can."""
        for link in self._links.values():
            if link.has_work:
                self._counters.sent += link.flush(self._make_status)
            self._poll_writable(link.connection, link.has_work)

    def _poll_writable(self, connection: Connection, is_wanted: bool) -> None:
        is_polled = connection.socket in self._poller
        if is_wanted and not is_polled:
            self._poller.register(connection.socket, zmq.POLLOUT)
        elif is_polled and not is_wanted:
            self._poller.unregister(connection.socket)

    def _forget_gone(self) -> None:
        for link in [link for link in self._links.values() if link.is_gone(FORGET_S)]:
            if link.peer:
                link.peer.link = None
            self._poll_writable(link.connection, False)
            self._poller.unregister(link.connection.monitor)
            link.connection.close()
            del self._links[link.address]
        self._receiver.forget(MAX_FORGOTTEN)

    def _read_monitor(self, link: OutgoingLink) -> None:
        for change in link.connection.changes():
            if change is ConnectionChange.UP:
                link.wants_status = True
            elif change is ConnectionChange.BROKEN:
                link.is_confirmed = False
                if link.peer:
                    self._receiver.lose_connection(link.peer)

    def _read_inbox(self) -> None:
        for _ in range(INBOX_BATCH):
            if not has_event(self._inbox, zmq.POLLIN):  # to be told by zmq.Again takes as long as a message
                return
            try:
                self._receiver.receive(decode(self._inbox.recv_multipart(zmq.NOBLOCK)))
            except WireError as error:
                self._counters.refuse("malformed", str(error))
