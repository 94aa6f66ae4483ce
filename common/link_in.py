"""The receiving half of links: which peer a message is from, and whether something is missing before it."""

import logging
import time
from collections.abc import Callable

from common.ids import PeerId
from common.link_counters import LinkCounters
from common.link_numbers import Arrival
from common.link_out import OutgoingLink, Peer
from common.service import LinkEvent, LinkLost, Received
from common.wire import (
    Control,
    Envelope,
    GatewayStatus,
    KVBlocks,
    KVFetch,
    KVRelease,
    LinkBroken,
    Status,
    WorkerStatus,
)

logger = logging.getLogger(__name__)


class LinkReceiver:
    """Turns envelopes into events. Owned by the I/O thread; `peers` is read by others.

    admit: the link to the address where a peer says that it lives, made if there is none; None when it is refused
    """

    def __init__(
        self,
        me: PeerId,
        counters: LinkCounters,
        deliver: Callable[[LinkEvent], None],
        admit: Callable[[str], OutgoingLink | None],
    ) -> None:
        self.peers: dict[PeerId, Peer] = {}
        self._me = me
        self._counters = counters
        self._deliver = deliver
        self._admit = admit

    def lose_connection(self, peer: Peer) -> None:
        """The connection to this peer broke."""
        num_unsent = self._discard(peer)
        peer.numbers.void_connection(num_unsent)
        self._lose(peer, "connection", "the connection broke")

    def forget(self, num_kept: int) -> None:
        """Keep only the latest of the peers that have no link."""
        unlinked = [peer.id for peer in self.peers.values() if peer.link is None]
        for peer_id in unlinked[: max(0, len(unlinked) - num_kept)]:
            del self.peers[peer_id]

    def receive(self, envelope: Envelope) -> None:
        message = envelope.message
        is_status = isinstance(message, WorkerStatus | GatewayStatus)
        peer = self.peers.get(envelope.sender) or Peer(envelope.sender)
        if envelope.to != self._me and not (is_status and not envelope.to):
            self._counters.refuse("misaddressed", f"from {envelope.sender} to {envelope.to!r}, this is {self._me}")
        elif peer.is_superseded:
            self._counters.refuse("superseded", f"from {envelope.sender}, whose address has another incarnation now")
        elif isinstance(message, KVFetch | KVBlocks | KVRelease):
            self._counters.refuse("misplaced", f"{type(message).__name__} from {envelope.sender} on a control link")
        else:
            self.peers[peer.id] = peer
            peer.last_heard_s = time.monotonic()
            if isinstance(message, WorkerStatus | GatewayStatus):
                self._receive_status(peer, envelope, message)
            else:
                self._receive_control(peer, envelope.seq, message)

    def _receive_status(self, peer: Peer, envelope: Envelope, status: Status) -> None:
        link = self._admit(status.address)
        if link is None:
            return
        self._join(peer, link)
        link.connection.retry()
        if not envelope.to:  # it does not know us yet, and its number means nothing
            link.wants_status = True
        else:
            arrival = peer.numbers.take_status(envelope.seq)
            if arrival is Arrival.DUPLICATE:
                self._counters.refuse("duplicate", f"a status of {peer.id} that is older than its messages")
                return
            if arrival is Arrival.GAP:
                self._report_gap(peer, envelope.seq)
        self._deliver(Received(peer.id, status))

    def _receive_control(self, peer: Peer, seq: int, message: Control) -> None:
        arrival = peer.numbers.take_message(seq)
        if arrival is Arrival.DUPLICATE:
            self._counters.refuse("duplicate", f"message {seq} of {peer.id}")
            return
        if arrival is Arrival.GAP:
            self._report_gap(peer, seq - 1)
        self._counters.received += 1
        if not isinstance(message, LinkBroken):
            self._deliver(Received(peer.id, message))
        elif not peer.numbers.is_known_lost(message.last_missing):
            peer.numbers.void_sent()
            self._discard(peer)
            self._lose(peer, "reported", f"{peer.id} missed messages: {message.reason}")

    def _join(self, peer: Peer, link: OutgoingLink) -> None:
        """The peer lives at the other end of this link."""
        if link.peer and link.peer is not peer:
            self._supersede(link.peer, peer)
        if peer.link and peer.link is not link:
            peer.link.peer = None
        peer.link, link.peer, link.is_confirmed = link, peer, True

    def _supersede(self, old: Peer, new: Peer) -> None:
        old.is_superseded = True
        old.link = None
        self._discard(old)
        self._lose(old, "incarnation", f"{new.id} lives at its address now")

    def _report_gap(self, peer: Peer, last_missing: int) -> None:
        reason = f"messages up to {last_missing} are missing"
        self._discard(peer)
        self._lose(peer, "gap", reason)
        # Where its first status is missing, too, this waits until we know its address.
        peer.outbox.append(LinkBroken(reason=reason, last_missing=last_missing))

    def _discard(self, peer: Peer) -> int:
        """Drop what waits to be sent, and say how much it was. Other threads may be appending."""
        num_unsent = 0
        while peer.outbox:
            peer.outbox.popleft()
            num_unsent += 1
        return num_unsent

    def _lose(self, peer: Peer, cause: str, reason: str) -> None:
        self._counters.lose(cause)
        logger.warning("link to %s lost: %s", peer.id, reason)
        self._deliver(LinkLost(peer.id, reason))
