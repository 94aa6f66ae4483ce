"""KV transfer inside one process, driven step by step: for simulations and tests of what is built on it.

Nothing happens by itself and there is no clock: the caller decides when a pull completes, fails or corrupts, and
when a release arrives. Bytes are copied and verified when both sides have memory.
"""

from collections import deque
from collections.abc import Callable, Mapping

from common.errors import TransferError
from common.ids import BlockId, PeerId, SequenceKey
from common.kv_layout import KVLayout, head_checksums
from common.kv_source import KVShard
from kvtransfer.transport import (
    AbortPull,
    BlockCopy,
    KVReleased,
    Publish,
    PullFinished,
    ReceiverEffect,
    SenderEffect,
    SendRelease,
    StartPull,
    TransferEvent,
    Withdraw,
)

Deliver = Callable[[TransferEvent], None]


class LoopbackSender:
    """Implements `KVSender`. published: what may be fetched, by key; memory: of a cache with all heads."""

    is_alive = True

    def __init__(self, shard: KVShard, deliver: Deliver, memory: memoryview | None = None) -> None:
        self.published: dict[SequenceKey, set[BlockId]] = {}
        self.memory = memory
        self._shard = shard
        self._deliver = deliver

    @property
    def shard(self) -> KVShard:
        return self._shard

    def apply(self, effect: SenderEffect) -> None:
        match effect:
            case Publish(key, block_ids):
                self.published.setdefault(key, set()).update(block_ids)
            case Withdraw(key):
                self.published.pop(key, None)

    def close(self) -> None:
        """From now on every fetch is refused."""
        self.published.clear()

    def release(self, key: SequenceKey) -> None:
        """A release arrives."""
        if self.published.pop(key, None) is not None:
            self._deliver(KVReleased(key))


class LoopbackReceiver:
    """Implements `KVReceiver`.

    senders:   by peer; one that is missing is dead
    pulls:     started and not finished, oldest first; end one with `complete` or `fail`
    releases:  sent and not arrived, oldest first; `arrive_release` delivers one, popping it loses it
    """

    is_alive = True

    def __init__(
        self, senders: Mapping[PeerId, LoopbackSender], deliver: Deliver, memory: memoryview | None = None
    ) -> None:
        self.pulls: dict[SequenceKey, StartPull] = {}
        self.releases: deque[SendRelease] = deque()
        self._senders = senders
        self._deliver = deliver
        self._memory = memory
        self._counts = {"kv_pulls": 0, "kv_pulls_failed": 0, "kv_received_blocks": 0}

    def apply(self, effect: ReceiverEffect) -> None:
        match effect:
            case StartPull(key):
                assert key not in self.pulls, f"{key} is being pulled already"
                self.pulls[key] = effect
                self._counts["kv_pulls"] += 1
            case AbortPull(key):
                if key in self.pulls:
                    self.fail(key, "aborted")
            case SendRelease():
                self.releases.append(effect)

    def complete(self, key: SequenceKey) -> None:
        """Let a pull end as the sender's state and the bytes say."""
        start = self.pulls[key]
        sender = self._senders.get(start.kv.source.peer)
        layout = start.kv.source.layout
        try:
            self._check_held(start, sender)
            if sender and sender.memory and self._memory:
                for copy in start.copies:
                    _copy_block(copy, sender.memory, self._memory, layout)
        except TransferError as error:
            self.fail(key, str(error))
            return
        del self.pulls[key]
        self._counts["kv_received_blocks"] += len(start.copies)
        self._deliver(PullFinished(key, "", len(start.copies) * layout.block_bytes))

    def fail(self, key: SequenceKey, error: str) -> None:
        """Let a pull end with an error."""
        del self.pulls[key]
        self._counts["kv_pulls_failed"] += 1
        self._deliver(PullFinished(key, error, 0))

    def arrive_release(self) -> None:
        release = self.releases.popleft()
        if sender := self._senders.get(release.source.peer):
            sender.release(release.key)

    def counters(self) -> dict[str, float]:
        return dict(self._counts)

    def close(self) -> None:
        for key in list(self.pulls):
            self.fail(key, "closed")

    def _check_held(self, start: StartPull, sender: LoopbackSender | None) -> None:
        if sender is None:
            raise TransferError(f"{start.kv.source.peer} is not there")
        published = sender.published.get(start.key)
        if published is None or not {copy.source for copy in start.copies} <= published:
            raise TransferError(f"the source refused: it does not hold {start.key} (any more)")


def _copy_block(copy: BlockCopy, source: memoryview, target: memoryview, layout: KVLayout) -> None:
    block_bytes = layout.block_bytes
    block = target[copy.target * block_bytes : (copy.target + 1) * block_bytes]
    block[:] = source[copy.source * block_bytes : (copy.source + 1) * block_bytes]
    if head_checksums(block, layout.head_bytes) != copy.checksums:
        raise TransferError(f"block {copy.source} of the source is corrupt")
