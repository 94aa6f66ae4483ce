"""Small pieces of memory that every service keeps about its peers. Pure."""

from collections import OrderedDict

from common.ids import PeerId, RequestId, SequenceKey

MAX_TOMBSTONES = 10_000
"""Requests whose cancel is remembered. At 200 cancelled requests a second that is 50 s, and 1 MB."""


class LivePeers:
    """Who was heard of lately."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last_heard_s: dict[PeerId, float] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._last_heard_s

    def __len__(self) -> int:
        return len(self._last_heard_s)

    def heard(self, peer: PeerId, now: float) -> None:
        self._last_heard_s[peer] = now

    def forget(self, peer: PeerId) -> None:
        self._last_heard_s.pop(peer, None)

    def pop_silent(self, now: float) -> list[PeerId]:
        """Forget and return those that were silent for longer than the timeout."""
        silent = [peer for peer, heard_s in self._last_heard_s.items() if now - heard_s > self._timeout_s]
        for peer in silent:
            self.forget(peer)
        return silent


class Tombstones:
    """Cancelled attempts, so that a cancel which overtakes what it cancels still wins."""

    def __init__(self, capacity: int = MAX_TOMBSTONES) -> None:
        self._capacity = capacity
        self._attempts: OrderedDict[RequestId, int] = OrderedDict()

    def add(self, key: SequenceKey) -> None:
        """This attempt and every earlier one are cancelled."""
        self._attempts[key.request_id] = max(key.attempt, self._attempts.pop(key.request_id, -1))
        if len(self._attempts) > self._capacity:
            self._attempts.popitem(last=False)

    def __contains__(self, key: SequenceKey) -> bool:
        return key.attempt <= self._attempts.get(key.request_id, -1)
