"""What every sans-I/O service takes and returns. Real loops drive them, and virtual clocks.

A service owns no socket, thread, tensor, callback or clock; `now` is given to it, in seconds.
"""

from dataclasses import dataclass

from common.ids import PeerId
from common.wire import Control, Status


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived, in the order in which its sender sent it, with none missing before it."""

    peer: PeerId
    message: Control | Status


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Messages between us and this peer were or may have been lost; what was under way is void."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class LinkFull:
    """This message was not sent: the peer does not read. Try again later, or give the peer up."""

    peer: PeerId
    message: Control


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Comes at least every TICK_S, also when nothing else happens."""


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: queue this message on the link to the peer."""

    peer: PeerId
    message: Control


LinkEvent = Received | LinkLost | LinkFull
TICK_S = 0.1
STATUS_S = 0.5
"""Between two statuses to a peer."""
