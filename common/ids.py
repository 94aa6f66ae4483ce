"""Identifiers that must never be mixed up."""

from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
"""Chosen by a gateway, unique over all gateways and restarts. Never a client's own id."""

PeerId = NewType("PeerId", str)
"""One incarnation of one service, `name#incarnation`. A restart at the same address is another peer."""

BlockId = NewType("BlockId", int)
"""Index of a block in one worker's KV cache."""


class SequenceKey(NamedTuple):
    """One attempt at one request. What arrives for another attempt of the request is stale."""

    request_id: RequestId
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"
