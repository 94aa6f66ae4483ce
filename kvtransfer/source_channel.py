"""A receiver's connection to one shard of a source: which pulls it serves, and how much is under way at a time."""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import zmq

from common.ids import PeerId, SequenceKey
from common.kv_source import KVShard
from common.link_socket import Connection
from common.wire import Envelope, KVFetch, KVRelease, Message, encode
from kvtransfer.pull import Fetch, Pull, Run
from kvtransfer.route import Route

MAX_FETCHES = 4
"""Window per shard, asked for or being read: 16 MiB over tcp, enough for 10 Gbit/s at 10 ms, little enough to forget
about."""
MAX_QUEUED = 1000


class SourceChannel:
    """Pulls from one shard share its window, the oldest first. Belongs to the transfer thread.

    Mutable: pulls (oldest first), fetches under way by number, runs that are being read (oldest first; those of ended
    pulls until they are here), releases that wait for the connection, used_s.
    """

    def __init__(self, context: "zmq.Context[Any]", me: PeerId, shard: KVShard, route: Route) -> None:
        """Raises: ConfigError when the shard's address is not one, or there are no sockets left."""
        self.shard = shard
        self.route = route
        self.connection = Connection(context, zmq.DEALER, shard.data_address, MAX_QUEUED)
        self.pulls: list[Pull] = []
        self.fetches: dict[int, Fetch] = {}
        self.runs: deque[Run] = deque()
        self.used_s = time.monotonic()
        self._me = me
        self._releases: deque[SequenceKey] = deque()

    @property
    def is_idle(self) -> bool:
        return not self.pulls and not self._releases

    @property
    def num_unsent_releases(self) -> int:
        return len(self._releases)

    def release(self, key: SequenceKey) -> None:
        self._releases.append(key)

    def forget(self, pull: Pull) -> None:
        """From now on answers for this pull are stale."""
        self.pulls.remove(pull)
        for number in [number for number, fetch in self.fetches.items() if fetch.pull is pull]:
            del self.fetches[number]

    def is_waiting(self, pull: Pull) -> bool:
        """Whether a pull makes no progress because older ones have the whole window."""
        under_way = (*self.fetches.values(), *self.runs)
        return self.connection.is_up and all(each.pull is not pull for each in under_way)

    def flush(self, numbers: Iterator[int]) -> None:
        """Send what the connection and the window allow."""
        if not self.connection.is_up:
            return
        while self._releases and self._send(0, _release(self._releases[0])):
            self._releases.popleft()
        for pull in self.pulls:
            while pull.wants_more and len(self.fetches) + len(self.runs) < MAX_FETCHES:
                fetch = pull.next_fetch(next(numbers), max(1, self.route.fetch_bytes // pull.piece_bytes))
                self.fetches[fetch.number] = fetch
                if not self._send(fetch.number, self._fetch_message(fetch)):
                    return  # the connection has just broken; its monitor will say so

    def close(self) -> None:
        self.route.close()
        self.connection.close()

    def _fetch_message(self, fetch: Fetch) -> KVFetch:
        request_id, attempt = fetch.pull.key
        return KVFetch(
            request_id=request_id,
            attempt=attempt,
            block_ids=fetch.block_ids,
            first_head=fetch.pull.heads.start,
            num_heads=len(fetch.pull.heads),
            with_data=self.route.with_data,
        )

    def _send(self, number: int, message: Message) -> bool:
        """number: of the fetch; the shard repeats it in its answers."""
        self.used_s = time.monotonic()
        try:
            self.connection.socket.send_multipart(
                encode(Envelope(self._me, self.shard.peer, number, message)), zmq.NOBLOCK
            )
        except zmq.Again:
            return False
        return True


def _release(key: SequenceKey) -> KVRelease:
    return KVRelease(request_id=key.request_id, attempt=key.attempt)
