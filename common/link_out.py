"""The sending half of a link: one connection to one address, and the peer that lives there."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from common.ids import PeerId
from common.link_numbers import LinkNumbers
from common.link_socket import Connection, has_event
from common.wire import Control, Envelope, Message, Status, encode

MakeStatus = Callable[[PeerId | None], Status]

MAX_OUTBOX = 1024
MAX_IN_ZMQ = 256
"""A link is full with MAX_OUTBOX + MAX_IN_ZMQ messages plus what the kernel's buffers take. Control messages are
0.1 to 100 KB, and a decode worker sends one a step, so this is some 20 s of a gateway that does not read."""

SILENT_S = 2.0
"""A peer that was silent for so long, which is four statuses, may be another incarnation by now. The last status of one
that has died may be read after its connection broke, and look like a sign of life."""


@dataclass(slots=True, eq=False)
class Peer:
    """What is remembered of one incarnation of a peer. Owned by the I/O thread; others only append to outbox.

    outbox:         not numbered yet
    link:           None while the peer's address is unknown, and when the link was given up
    last_heard_s:   by the monotonic clock
    is_superseded:  another incarnation was seen at its address: whatever still comes from it is stale
    """

    id: PeerId
    numbers: LinkNumbers = field(default_factory=LinkNumbers)
    outbox: deque[Control] = field(default_factory=lambda: deque[Control]())
    link: "OutgoingLink | None" = None
    last_heard_s: float = 0.0
    is_superseded: bool = False


class OutgoingLink:
    """A connection to a peer's inbox. Owned by the I/O thread.

    Mutable: peer (None until its first status), is_configured, and
    is_confirmed:  the peer is known to be the one at the other end of this very connection; until then, and while it
                   is silent, statuses are addressed to whoever is there
    wants_status:  a status is due; it is made at the moment when it can be sent, so it is never queued
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", me: PeerId, address: str) -> None:
        """Raises: ConfigError when the address is not one, or there are no sockets left."""
        self.address = address
        self.connection = Connection(context, zmq.PUSH, address, MAX_IN_ZMQ)
        self.peer: Peer | None = None
        self.is_configured = False
        self.is_confirmed = False
        self.wants_status = True
        self._me = me

    @property
    def has_work(self) -> bool:
        """Whether something is to be sent and may be.

        Right after a connection broke, ZeroMQ still takes messages into the queue of the old one and loses them;
        so nothing is handed to it before the monitor has reported the new one.
        """
        return self.connection.is_up and (self.wants_status or bool(self.peer and self.peer.outbox))

    def flush(self, make_status: MakeStatus) -> int:
        """Send what can be sent now, and return the number of control messages that were.

        A status goes first, so that a peer knows our address before it has to answer anything.
        """
        num_sent = 0
        while self.has_work and has_event(self.connection.socket, zmq.POLLOUT):
            if self.wants_status:
                if not self._send_status(make_status):
                    break
            elif self.peer:
                if not self._send(self.peer.id, self.peer.numbers.last_sent + 1, self.peer.outbox[0]):
                    break
                self.peer.outbox.popleft()
                self.peer.numbers.last_sent += 1
                num_sent += 1
        return num_sent

    def is_gone(self, silence_s: float) -> bool:
        """Whether nobody is there any more: not configured, down, and not heard of for so long."""
        if self.is_configured or self.connection.is_up:
            return False
        return self.peer is None or time.monotonic() - self.peer.last_heard_s > silence_s

    def _send_status(self, make_status: MakeStatus) -> bool:
        status = make_status(self.peer.id if self.peer else None)
        if self.peer and self.is_confirmed and time.monotonic() - self.peer.last_heard_s < SILENT_S:
            is_sent = self._send(self.peer.id, self.peer.numbers.last_sent, status)
        else:
            is_sent = self._send(PeerId(""), 0, status)
        self.wants_status = not is_sent
        return is_sent

    def _send(self, to: PeerId, seq: int, message: Message) -> bool:
        """False when the connection broke after it was found writable."""
        frames = encode(Envelope(self._me, to, seq, message))
        try:
            self.connection.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
