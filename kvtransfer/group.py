"""KV transfer of a worker that is split over ranks: rank 0's side for all of them, and what travels between ranks.

Each rank has a server or puller of its own for its KV heads. Rank 0 passes effects on, and makes one event of theirs.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from common.errors import WireError
from common.ids import SequenceKey
from common.kv_source import KVShard
from kvtransfer.transport import (
    AbortPull,
    KVReceiver,
    KVSender,
    Publish,
    PullFinished,
    ReceiverEffect,
    SenderEffect,
    SendRelease,
    StartPull,
    Withdraw,
)

RankMessage = Publish | Withdraw | StartPull | AbortPull | PullFinished | KVShard

_DECODERS = {
    cls.__name__: msgspec.msgpack.Decoder(cls)
    for cls in (Publish, Withdraw, StartPull, AbortPull, PullFinished, KVShard)
}
_encoder = msgspec.msgpack.Encoder()
_tagged_decoder = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])


def encode_for_rank(message: RankMessage) -> bytes:
    return _encoder.encode((type(message).__name__, message))


def decode_from_rank(data: bytes) -> RankMessage:
    """Raises: WireError."""
    try:
        tag, fields = _tagged_decoder.decode(data)
        return _DECODERS[tag].decode(fields)
    except (msgspec.DecodeError, KeyError) as error:
        raise WireError(f"a message between ranks: {error}") from error


def decode_shard(data: bytes) -> KVShard:
    """What a rank's `RankSide.shard` says. Raises: WireError."""
    shard = decode_from_rank(data)
    if not isinstance(shard, KVShard):
        raise WireError(f"a rank has a shard of the cache, got {type(shard).__name__}")
    return shard


class GroupSender:
    """Rank 0's `KVSender`.

    log_publish:  passes an effect on and returns when all ranks have carried it out: from then on, whoever is told of
                  the handoff may ask any of them. It takes as long as waking them up, once a prompt.
    log_withdraw: passes it on; ranks carry it out before they write into the blocks, since the log has one order
    """

    def __init__(
        self, own: KVSender, log_publish: Callable[[bytes], None], log_withdraw: Callable[[bytes], None]
    ) -> None:
        self._own = own
        self._log_publish = log_publish
        self._log_withdraw = log_withdraw

    def apply(self, effect: SenderEffect) -> None:
        self._own.apply(effect)
        match effect:
            case Publish():
                self._log_publish(encode_for_rank(effect))
            case Withdraw():
                self._log_withdraw(encode_for_rank(effect))


@dataclass(slots=True)
class _GroupPull:
    """A pull that some ranks have not finished. error: of the first that failed."""

    num_unfinished: int
    error: str = ""
    num_bytes: int = 0


class GroupReceiver:
    """Rank 0's `KVReceiver`: a pull is finished when it is at all ranks, and has failed when it has at one.

    Mutable: pulls that are not finished at all ranks, guarded by _lock.
    """

    def __init__(
        self,
        size: int,
        make_own: Callable[[Callable[[PullFinished], None]], KVReceiver],
        log: Callable[[bytes], None],
        deliver: Callable[[PullFinished], None],
    ) -> None:
        """size: ranks, this one included.

        make_own: our own receiver, given what takes its events
        log:      passes an effect on to the others; any thread
        deliver:  takes the one event of each pull; called in the thread of whichever rank was the last
        """
        self._size = size
        self._log = log
        self._deliver = deliver
        self._lock = threading.Lock()
        self._pulls: dict[SequenceKey, _GroupPull] = {}
        self._own = make_own(self.finished)

    def apply(self, effect: ReceiverEffect) -> None:
        """A release is for rank 0 of the source, and of rank 0 here."""
        match effect:
            case StartPull(key):
                with self._lock:
                    self._pulls[key] = _GroupPull(self._size)
                self._log(encode_for_rank(effect))
            case AbortPull():
                self._log(encode_for_rank(effect))
            case SendRelease():
                pass
        self._own.apply(effect)

    def take_event(self, data: bytes) -> None:
        """What another rank reports. Raises: WireError."""
        event = decode_from_rank(data)
        if not isinstance(event, PullFinished):
            raise WireError(f"a rank reports the end of pulls only, got {type(event).__name__}")
        self.finished(event)

    def finished(self, event: PullFinished) -> None:
        """One rank is done with a pull. The first that failed ends it at the others, too."""
        with self._lock:
            pull = self._pulls[event.key]
            is_first_error = bool(event.error and not pull.error)
            pull.error = pull.error or event.error
            pull.num_bytes += event.num_bytes
            pull.num_unfinished -= 1
            is_last = pull.num_unfinished == 0
            if is_last:
                del self._pulls[event.key]
        if is_last:
            self._deliver(PullFinished(event.key, pull.error, pull.num_bytes))
        elif is_first_error:
            self.apply(AbortPull(event.key))

    @property
    def is_alive(self) -> bool:
        return self._own.is_alive

    def counters(self) -> dict[str, float]:
        """Rank 0's own: ranks pull alike."""
        return self._own.counters()

    def close(self) -> None:
        self._own.close()


class RankSide:
    """The KV transfer of another rank than rank 0, as the group's log drives it."""

    def __init__(self, own: KVSender | KVReceiver, shard: KVShard | None = None) -> None:
        """shard: what a sender has, for rank 0 to publish."""
        self._own = own
        self.shard = encode_for_rank(shard) if shard else b""

    @property
    def is_alive(self) -> bool:
        return self._own.is_alive

    def apply(self, effect: bytes) -> None:
        """Raises: WireError."""
        self._own.apply(decode_from_rank(effect))  # pyright: ignore[reportArgumentType]

    def close(self) -> None:
        self._own.close()
