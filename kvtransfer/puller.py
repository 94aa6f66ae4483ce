"""The receiving side of KV transfer: pulls blocks into reserved ones, and says when they are all verified.

1. `StartPull`: layouts are compared, our heads are shared out over the source's shards; for each that has some of
   them the route is chosen, and a connection is made or reused.
2. Blocks are asked for in fetches of bounded size, a bounded number of them under way per shard.
3. Each run that answers a fetch is read, copied into its targets, and the targets' checksums are compared.
4. `PullFinished` comes exactly once: when all heads of all blocks are verified, or with an error: refused, wrong twice,
   the connection broke, no progress for pull_timeout_s, aborted, closed. What fails at one shard ends at all of them.
   After it nothing touches the targets.
5. `SendRelease` goes to the source's first shard, over the same connection if there is one.
"""

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from common.errors import BatonError, LayoutMismatch, TransferError, WireError
from common.ids import PeerId, SequenceKey
from common.kv_layout import KVLayout
from common.kv_source import KVShard, KVSource
from common.link_socket import ConnectionChange, max_connections
from common.shard_memory import BlockMemory
from common.socket_thread import SocketThread
from common.wire import Buffer, Envelope, KVBlocks, decode
from kvtransfer.nixl import DESCRIPTORS_PER_SOURCE
from kvtransfer.pull import Pull, Run
from kvtransfer.reshard import plan_pulls
from kvtransfer.route import Mode, choose_route
from kvtransfer.source_channel import SourceChannel
from kvtransfer.transfer_counters import receiver_counters
from kvtransfer.transport import AbortPull, PullFinished, ReceiverEffect, SendRelease, StartPull

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""A connection that was not used for so long is closed."""
RECEIVE_BATCH = 16
READ_POLL_MS = 1
"""How often reads are looked at that are under way: nothing else says when one is done."""


@dataclass(slots=True)
class _Parts:
    """The pulls of one `StartPull` that are under way, and where; num_bytes: of those that are complete."""

    under_way: dict[Pull, SourceChannel]
    num_bytes: int = 0


class KVPuller:
    """Implements `KVReceiver`. One thread owns the sockets and every write to targets; it calls `deliver`.

    memory:          the whole cache, which has some heads of the model's
    layout:          of blocks with all heads
    mode:            see `choose_route`
    pull_timeout_s:  without a single block arriving
    """

    def __init__(
        self,
        peer: PeerId,
        memory: BlockMemory,
        layout: KVLayout,
        deliver: Callable[[PullFinished], None],
        mode: Mode = "auto",
        pull_timeout_s: float = 10.0,
        idle_s: float = IDLE_S,
    ) -> None:
        heads = memory.heads
        assert 0 <= heads.start < heads.stop <= layout.num_kv_heads, f"{heads} of {layout.num_kv_heads} heads"
        self._peer = peer
        self._memory = memory
        self._layout = layout
        self._deliver = deliver
        self._mode: Mode = mode
        self._pull_timeout_s = pull_timeout_s
        self._idle_s = idle_s
        self._counters = receiver_counters()
        self._effects: deque[ReceiverEffect] = deque()
        self._max_channels = max_connections(DESCRIPTORS_PER_SOURCE if mode == "nixl" else 0)
        # The thread's:
        self._channels: dict[KVShard, SourceChannel] = {}
        self._parts: dict[SequenceKey, _Parts] = {}
        self._numbers = itertools.count(1)
        self._poller = zmq.Poller()
        self._thread = SocketThread(f"kv puller {peer}", self._run)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False after `close`, and when the thread died of a bug of ours."""
        return self._thread.is_alive

    def apply(self, effect: ReceiverEffect) -> None:
        self._effects.append(effect)
        self._thread.wakeup.set()

    def counters(self) -> dict[str, float]:
        return self._counters.totals()

    def close(self) -> None:
        """End all pulls with an error, and the thread. Idempotent."""
        self._thread.close()

    # All below runs in the thread.

    def _run(self) -> None:
        self._poller.register(self._thread.wakeup.fileno, zmq.POLLIN)
        try:
            while not self._thread.is_closing:
                self._turn()
        finally:
            self._end_all()

    def _end_all(self) -> None:
        for channel in list(self._channels.values()):
            self._drop(channel, "this worker's transfer thread ended")
        for effect in self._effects:
            if isinstance(effect, StartPull):
                self._finished(effect.key, "this worker's transfer thread ended", 0)

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._next_timeout_ms()))
        if self._thread.wakeup.fileno in ready:
            self._thread.wakeup.clear()
        while self._effects:
            self._apply(self._effects.popleft())
        for channel in list(self._channels.values()):
            if channel.connection.socket in ready:
                self._receive(channel)
            if channel.runs and not self._advance(channel):
                continue
            if channel.connection.monitor in ready:
                self._read_monitor(channel)
            else:
                channel.flush(self._numbers)
        self._expire(time.monotonic())

    def _apply(self, effect: ReceiverEffect) -> None:
        match effect:
            case StartPull():
                self._start(effect)
            case AbortPull(key):
                self._fail(key, "aborted")
            case SendRelease(key, source):
                try:
                    self._channel(source, source.shards[0]).release(key)
                except BatonError as error:
                    self._counters.add("kv_releases_unsent")
                    logger.warning("cannot release %s at %s: %s", key, source.peer, error)

    def _start(self, start: StartPull) -> None:
        assert start.key not in self._parts, f"{start.key} is being pulled already"
        self._counters.add("kv_pulls")
        try:
            self._check_layout(start.kv.source)
            parts = self._parts_of(start)
        except BatonError as error:
            self._finished(start.key, str(error), 0)
            return
        self._parts[start.key] = _Parts(parts)
        for pull, channel in list(parts.items()):
            pull.progress_s = time.monotonic()
            channel.pulls.append(pull)
            if pull.is_complete:  # nothing to copy
                self._complete(channel, pull)

    def _parts_of(self, start: StartPull) -> dict[Pull, SourceChannel]:
        """A pull from each shard that we need. Raises: TransferError, ConfigError."""
        source = start.kv.source
        parts: dict[Pull, SourceChannel] = {}
        for part in plan_pulls(source.shards, self._memory.heads):
            channel = self._channel(source, part.shard)
            parts[Pull(start, part, channel.route, self._memory, self._counters)] = channel
        return parts

    def _check_layout(self, source: KVSource) -> None:
        if mismatches := self._layout.mismatches(source.layout):
            sides = f"{self._peer} != {source.peer}"
            raise LayoutMismatch(f"KV layouts differ, {sides}: {', '.join(mismatches)}")

    def _channel(self, source: KVSource, shard: KVShard) -> SourceChannel:
        """The connection to a shard, made if there is none. Raises: TransferError, ConfigError."""
        if shard in self._channels:
            return self._channels[shard]
        if len(self._channels) >= self._max_channels:
            raise TransferError(f"cannot connect to {shard.peer}: there are {len(self._channels)} sources already")
        route = choose_route(self._mode, source, shard)
        if shard.shm_name and route.with_data and self._mode != "tcp":
            self._counters.add("kv_shm_unavailable")
        channel = SourceChannel(self._thread.context, self._peer, shard, route)
        self._channels[shard] = channel
        self._poller.register(channel.connection.socket, zmq.POLLIN)
        self._poller.register(channel.connection.monitor, zmq.POLLIN)
        return channel

    def _read_monitor(self, channel: SourceChannel) -> None:
        address = channel.shard.data_address
        for change in channel.connection.changes():
            match change:
                case ConnectionChange.UP:
                    channel.flush(self._numbers)
                case ConnectionChange.BROKEN:
                    self._drop(channel, f"the connection to {channel.shard.peer} at {address} broke")
                    return
                case ConnectionChange.FAILED:
                    self._drop(channel, f"cannot connect to {channel.shard.peer} at {address}")
                    return

    def _receive(self, channel: SourceChannel) -> None:
        for _ in range(RECEIVE_BATCH):
            try:
                frames = channel.connection.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                envelope = decode([frame.buffer for frame in frames])
            except WireError as error:
                self._counters.refuse("malformed")
                logger.debug("data channel of %s: %s", channel.shard.peer, error)
                continue
            if isinstance(envelope.message, KVBlocks):
                self._take(channel, envelope, envelope.message)
            else:
                self._counters.refuse("unasked")

    def _take(self, channel: SourceChannel, envelope: Envelope, message: KVBlocks) -> None:
        fetch = channel.fetches.get(envelope.seq)
        is_ours = envelope.to == self._peer and (envelope.sender == channel.shard.peer or message.refusal)
        if fetch is None or not is_ours or fetch.pull.key != (message.request_id, message.attempt):
            self._counters.refuse("stale")
            return
        try:
            run = fetch.pull.begin(fetch, message, envelope.buffers)
        except TransferError as error:
            self._fail(fetch.pull.key, str(error))
            return
        if run:
            channel.runs.append(run)
        self._take_arrived(channel)
        if fetch.is_answered:
            channel.fetches.pop(fetch.number, None)
            channel.flush(self._numbers)  # at once: the source works on the next one while we copy

    def _advance(self, channel: SourceChannel) -> bool:
        """Take what was read meanwhile. False when the route has failed, and the connection was closed for it."""
        try:
            for run in channel.runs:
                run.read.advance()
        except TransferError as error:
            failure = str(error)
        else:
            self._take_arrived(channel)
            return True
        self._drop(channel, failure)  # out here, where no exception refers to what the route closes
        return False

    def _take_arrived(self, channel: SourceChannel) -> None:
        """In the order in which they were granted: older pulls end first."""
        while channel.runs and (blocks := channel.runs[0].read.blocks) is not None:
            run = channel.runs.popleft()
            if run.pull in channel.pulls:  # and has not ended meanwhile
                self._copy(channel, run, blocks)
            run.read.close()

    def _copy(self, channel: SourceChannel, run: Run, blocks: Sequence[Buffer]) -> None:
        pull = run.pull
        try:
            num_blocks = pull.take(run.block_ids, blocks)
        except TransferError as error:
            self._fail(pull.key, str(error))
            return
        if num_blocks:
            pull.progress_s = time.monotonic()
            self._counters.add("kv_received_blocks", num_blocks)
            self._counters.add(f"kv_received_bytes_{pull.route.name}", num_blocks * pull.piece_bytes)
        if pull.is_complete:
            self._complete(channel, pull)

    def _complete(self, channel: SourceChannel, pull: Pull) -> None:
        channel.forget(pull)
        parts = self._parts[pull.key]
        parts.num_bytes += pull.num_bytes
        del parts.under_way[pull]
        if not parts.under_way:
            del self._parts[pull.key]
            self._finished(pull.key, "", parts.num_bytes)

    def _fail(self, key: SequenceKey, error: str) -> None:
        """End all that is under way for a key, if there is anything."""
        if parts := self._parts.pop(key, None):
            for pull, channel in parts.under_way.items():
                channel.forget(pull)
                parts.num_bytes += pull.num_bytes
            self._finished(key, error, parts.num_bytes)

    def _finished(self, key: SequenceKey, error: str, num_bytes: int) -> None:
        if error:
            self._counters.add("kv_pulls_failed")
        self._deliver(PullFinished(key, error, num_bytes))

    def _drop(self, channel: SourceChannel, reason: str) -> None:
        """Close a connection; its pulls end with an error. The next pull makes a new one."""
        del self._channels[channel.shard]
        self._poller.unregister(channel.connection.socket)
        self._poller.unregister(channel.connection.monitor)
        for pull in list(channel.pulls):
            self._fail(pull.key, reason)
        self._counters.add("kv_releases_unsent", channel.num_unsent_releases)
        channel.close()

    def _expire(self, now: float) -> None:
        for channel in list(self._channels.values()):
            for pull in list(channel.pulls):
                if channel.is_waiting(pull):
                    pull.progress_s = now
                elif now - pull.progress_s >= self._pull_timeout_s:
                    self._fail(pull.key, f"no block from {channel.shard.peer} in {self._pull_timeout_s} s")
            if channel.is_idle and now - channel.used_s >= self._idle_s:
                self._drop(channel, "not used")

    def _next_timeout_ms(self) -> int | None:
        """Until a read may be done, or a pull or connection may have to be given up; None when there is none."""
        if any(channel.runs for channel in self._channels.values()):
            return READ_POLL_MS
        due_s = [
            min((pull.progress_s for pull in channel.pulls), default=math.inf) + self._pull_timeout_s
            for channel in self._channels.values()
        ]
        due_s += [channel.used_s + self._idle_s for channel in self._channels.values() if channel.is_idle]
        wait_s = min(due_s, default=math.inf) - time.monotonic()
        return None if wait_s == math.inf else max(0, math.ceil(wait_s * 1000))
