"""The sending side of KV transfer: serves fetches out of the cache's memory.

1. `Publish` makes blocks fetchable under a key, `Withdraw` ends that. Both act at once, in the caller's thread.
2. A receiver sends `KVFetch` of a bounded number of blocks, and has a bounded number of fetches under way: that
   bounds what can pile up here for a receiver that does not read.
3. The answer is one or several `KVBlocks`, whose frames are views of the cache, or one with a refusal.
4. `KVRelease` says that the receiver has everything.

Each rank of a worker group has a server of its own, for the heads that it has.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from common.errors import ConfigError, WireError
from common.ids import BlockId, PeerId, SequenceKey
from common.kv_source import KVShard
from common.link_socket import bind, set_options
from common.shard_memory import BlockMemory
from common.socket_thread import SocketThread
from common.wire import (
    MAX_HEADER_BYTES,
    Envelope,
    KVBlocks,
    KVFetch,
    KVRelease,
    decode,
    encode,
)
from kvtransfer.nixl import RegisteredMemory
from kvtransfer.shm import SharedSegment
from kvtransfer.transfer_counters import sender_counters
from kvtransfer.transport import KVReleased, Publish, SenderEffect, Withdraw

logger = logging.getLogger(__name__)

RUN_BYTES = 2**20
"""Blocks are sent in runs of about this size, so that the receiver verifies one while the next is on its way."""
MAX_UNSENT_RUNS = 256
"""Per receiver. One that keeps to its window (see `source_channel`) has a sixteenth of it under way."""
LOOPBACK = "tcp://127."
LOOPBACK_SEND_BYTES = 2**19
"""Of the system's send buffer where all receivers are on this host: there is no latency to cover, and what waits in a
larger one leaves the cores' caches: 2.1 GB/s instead of 2.7 (190 MB, two cores of a Xeon 6, 2026-12)."""
READ_S = 10.0
"""How long after the last grant somebody may still be reading through NIXL."""


class KVServer:
    """Implements `KVSender`. One thread owns the socket; it calls `deliver`, with nothing locked.

    memory:      the whole cache; only read
    segment:     the shared memory that `memory` lies in, if it does
    registered:  `memory` as NIXL agents read it, if they can; the thread uses it from now on
    """

    def __init__(
        self,
        peer: PeerId,
        memory: BlockMemory,
        deliver: Callable[[KVReleased], None],
        bind_to: str,
        advertise_host: str | None = None,
        segment: SharedSegment | None = None,
        registered: RegisteredMemory | None = None,
    ) -> None:
        """Raises: ConfigError when the data channel cannot be bound."""
        self._peer = peer
        self._memory = memory
        self._deliver = deliver
        self._registered = registered
        self._granted_s = -math.inf  # the thread's: when it was last granted to read
        self._counters = sender_counters()
        self._lock = threading.Lock()
        self._published: dict[SequenceKey, set[BlockId]] = {}  # guarded by _lock
        self._thread = SocketThread(f"kv server {peer}", self._run)
        self._socket = self._thread.context.socket(zmq.ROUTER)
        set_options(self._socket, MAX_UNSENT_RUNS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if bind_to.startswith(LOOPBACK):
            self._socket.setsockopt(zmq.SNDBUF, LOOPBACK_SEND_BYTES)
        try:
            address = bind(self._socket, bind_to, advertise_host or "")
        except ConfigError:
            self._thread.close()
            raise
        self._shard = KVShard(
            peer=peer,
            data_address=address,
            shm_name=segment.name if segment else "",
            shm_nonce=segment.nonce if segment else "",
            first_head=memory.heads.start,
            num_heads=len(memory.heads),
            nixl_agent=registered.agent if registered else b"",
            nixl_address=registered.address if registered else 0,
        )
        self._thread.start()

    @property
    def shard(self) -> KVShard:
        return self._shard

    @property
    def is_alive(self) -> bool:
        """False after `close`, and when the thread died of a bug of ours."""
        return self._thread.is_alive

    def apply(self, effect: SenderEffect) -> None:
        """Any thread. Blocks of one key that are published one after the other add up."""
        with self._lock:
            match effect:
                case Publish(key, block_ids):
                    self._published.setdefault(key, set()).update(block_ids)
                case Withdraw(key):
                    self._published.pop(key, None)

    def counters(self) -> dict[str, float]:
        """Totals for /metrics. Any thread."""
        return self._counters.totals()

    def close(self) -> None:
        """Stop the thread. What was not sent yet is dropped, and no view of the memory is left. Idempotent."""
        self._thread.close()

    # All below runs in the thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._thread.wakeup.fileno, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while not self._thread.is_closing:
            if self._socket in dict(poller.poll(self._next_timeout_ms())):
                self._receive()
            if self._registered:
                self._registered.progress()

    def _next_timeout_ms(self) -> int | None:
        """Until NIXL is to do its part of a read: every millisecond at first, then less and less often."""
        since_s = time.monotonic() - self._granted_s
        if not self._registered or since_s >= READ_S:
            return None
        return max(1, int(since_s * 1000 / 10))

    def _receive(self) -> None:
        identity, *frames = self._socket.recv_multipart()
        try:
            envelope = decode(frames)
        except WireError as error:
            self._counters.add("kv_refused_malformed")
            logger.debug("data channel: %s", error)
            return
        match envelope.message:
            case KVFetch():
                self._counters.add("kv_fetches")
                self._serve(identity, envelope, envelope.message)
            case KVRelease(request_id=request_id, attempt=attempt) if envelope.to == self._peer:
                self._release(SequenceKey(request_id, attempt))
            case _:
                self._counters.add("kv_refused_malformed")

    def _serve(self, identity: bytes, fetch_envelope: Envelope, fetch: KVFetch) -> None:
        def answer(message: KVBlocks, buffers: Sequence[memoryview] = ()) -> bool:
            # The number of the fetch goes back with the answer, so that the receiver knows what it is for.
            envelope = Envelope(self._peer, fetch_envelope.sender, fetch_envelope.seq, message, buffers)
            return self._send([identity, *encode(envelope)])

        if refusal := self._refusal(fetch_envelope.to, fetch):
            self._counters.add("kv_fetches_refused")
            answer(_blocks(fetch, 0, (), refusal))
        elif not fetch.with_data:
            self._granted_s = time.monotonic()
            answer(_blocks(fetch, 0, fetch.block_ids))
        else:
            piece_bytes = fetch.num_heads * self._memory.head_bytes
            run_length = max(1, RUN_BYTES // piece_bytes)
            for first in range(0, len(fetch.block_ids), run_length):
                block_ids = fetch.block_ids[first : first + run_length]
                pieces = self._memory.read(block_ids, fetch.heads)
                if not answer(_blocks(fetch, first, block_ids), pieces):
                    return
                self._counters.add("kv_sent_blocks", len(block_ids))
                self._counters.add("kv_sent_bytes", len(block_ids) * piece_bytes)

    def _refusal(self, to: PeerId, fetch: KVFetch) -> str:
        if to != self._peer:
            return f"this is {self._peer}, not {to}"
        ours, end = self._memory.heads, fetch.first_head + fetch.num_heads
        if not ours.start <= fetch.first_head < end <= ours.stop:
            return f"{self._peer} has heads {ours.start} to {ours.stop - 1}, got {fetch.first_head} to {end - 1}"
        key = SequenceKey(fetch.request_id, fetch.attempt)
        with self._lock:
            published = self._published.get(key)
            if published is None:
                return f"{self._peer} does not hold {key} (any more)"
            if unknown := sorted(set(fetch.block_ids) - published):
                return f"{self._peer} holds {key}, but blocks {unknown[:5]} are not part of it"
        return ""

    def _send(self, frames: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Without copying large frames. False when the receiver is gone, or does not keep to its window."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._counters.add("kv_fetches_undeliverable")
            return False
        return True

    def _release(self, key: SequenceKey) -> None:
        with self._lock:
            was_published = self._published.pop(key, None) is not None
        if was_published:
            self._counters.add("kv_releases")
            self._deliver(KVReleased(key))


def _blocks(fetch: KVFetch, first: int, block_ids: tuple[BlockId, ...], refusal: str = "") -> KVBlocks:
    return KVBlocks(
        request_id=fetch.request_id, attempt=fetch.attempt, refusal=refusal, first=first, block_ids=block_ids
    )
