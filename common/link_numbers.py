"""Sequence numbers of the two directions of a link: what tells a loss from silence. Pure."""

from dataclasses import dataclass
from enum import Enum, auto


class Arrival(Enum):
    """What a received number says.

    NEXT:       nothing is missing before it
    DUPLICATE:  seen before, or older than what was seen: drop it
    GAP:        numbers before it are missing and count as lost; receiving goes on from here
    """

    NEXT = auto()
    DUPLICATE = auto()
    GAP = auto()


@dataclass(slots=True)
class LinkNumbers:
    """Numbers exchanged with one incarnation of a peer: messages count 1, 2, 3 … in each direction.

    last_sent:      given to the latest message, be it sent or void
    last_received:  of the latest message taken
    void_until:     messages to the peer up to this number are already known to be lost
    """

    last_sent: int = 0
    last_received: int = 0
    void_until: int = 0

    def take_message(self, seq: int) -> Arrival:
        if seq <= self.last_received:
            return Arrival.DUPLICATE
        is_next = seq == self.last_received + 1
        self.last_received = seq
        return Arrival.NEXT if is_next else Arrival.GAP

    def take_status(self, last_sent: int) -> Arrival:
        """A status has no number of its own: it repeats the last one that its sender gave to a message."""
        if last_sent > self.last_received:
            self.last_received = last_sent
            return Arrival.GAP
        return Arrival.NEXT if last_sent == self.last_received else Arrival.DUPLICATE

    def void_sent(self) -> None:
        """Everything sent so far counts as lost."""
        self.void_until = self.last_sent

    def void_connection(self, num_unsent: int) -> None:
        """The connection broke: so does everything that waited. One number more is used up, so that the
        other side always sees a gap and gives up the same things as we do.
        """
        self.last_sent += num_unsent + 1
        self.void_sent()

    def is_known_lost(self, last_missing: int) -> bool:
        """Whether a peer's complaint is about messages that we gave up ourselves. 0: it does not know which."""
        return 0 < last_missing <= self.void_until
