"""An in-memory network that keeps each link's order, loses messages with notice, and is full now and then."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from bench.planning.clock import Clock
from common.ids import PeerId
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
    decode,
    encode,
)

MAX_DELAY_S = 0.02

Link = tuple[PeerId, PeerId]
"""sender, receiver"""


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances, between 0 and 1.

    loss: that a message, a release or a pull is lost.  full: that a link does not take a message.
    """

    loss: float = 0.0
    full: float = 0.0


class Network:
    """Carries messages through the real encoding, after random delays: different links overtake each other.

    deliver: hands an event to the peer named first, if it is alive
    Mutable state: faults, which a test may change at any time; per link the time of the last arrival, and how
    many messages were sent and heard.
    """

    def __init__(self, clock: Clock, random: Random, deliver: Callable[[PeerId, LinkEvent], None]) -> None:
        self.faults = Faults()
        self._clock = clock
        self._random = random
        self._deliver = deliver
        self._last_arrival_s: defaultdict[Link, float] = defaultdict(float)
        self._num_sent: defaultdict[Link, int] = defaultdict(int)
        self._num_heard: defaultdict[Link, int] = defaultdict(int)

    def loses(self) -> bool:
        return self._random.random() < self.faults.loss

    def send(self, sender: PeerId, to: PeerId, message: Control | Status) -> bool:
        """False: the link is full. What links say by themselves is never too much, and statuses are not numbered."""
        link = (sender, to)
        is_status = isinstance(message, WorkerStatus | GatewayStatus)
        if not (is_status or isinstance(message, LinkBroken)) and self._random.random() < self.faults.full:
            return False
        self._num_sent[link] += 0 if is_status else 1
        if not self.loses():
            frames = encode(Envelope(sender, to, self._num_sent[link], message))
            delayed_s = self._clock.now + self._random.uniform(0, MAX_DELAY_S)
            self._last_arrival_s[link] = max(delayed_s, self._last_arrival_s[link])
            self._clock.at(self._last_arrival_s[link], lambda: self._arrive(decode(frames)))
        return True

    def _arrive(self, envelope: Envelope) -> None:
        """A missing message is noticed with the next one, and the other side is told."""
        sender, to, message = envelope.sender, envelope.to, envelope.message
        assert not isinstance(message, KVFetch | KVBlocks | KVRelease), "the KV transfer does not use links"
        is_status = isinstance(message, WorkerStatus | GatewayStatus)
        expected = self._num_heard[sender, to] + (0 if is_status else 1)
        self._num_heard[sender, to] = envelope.seq
        if envelope.seq != expected:
            self._deliver(to, LinkLost(sender, "messages are missing"))
            self.send(to, sender, LinkBroken(reason="messages are missing"))
        if isinstance(message, LinkBroken):
            self._deliver(to, LinkLost(sender, message.reason))
        else:
            self._deliver(to, Received(sender, message))
