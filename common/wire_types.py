"""Types of fields of messages, with bounds that `wire.decode` checks."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
TokenIds = tuple[Count, ...]
Address = Annotated[str, msgspec.Meta(pattern="^(tcp|ipc)://", max_length=300)]
"""A ZeroMQ endpoint of a service. Its other transports are not for peers: they reach into this process, or abort it."""
