"""The seam between what a worker decides about KV blocks and how they are moved. Free of torch and zmq."""

from dataclasses import dataclass
from typing import Protocol

from common.ids import BlockId, SequenceKey
from common.kv_layout import HeadChecksums
from common.kv_source import KVDescriptor, KVShard, KVSource


@dataclass(frozen=True, slots=True)
class Publish:
    """Prefill effect: these blocks may be fetched under this key."""

    key: SequenceKey
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Prefill effect: refuse every fetch under this key from now on. Idempotent."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block to pull: from the source's block into our reserved one.

    checksums: of all heads of the model
    """

    source: BlockId
    target: BlockId
    checksums: HeadChecksums


@dataclass(frozen=True, slots=True)
class StartPull:
    """Decode effect: pull our heads of these blocks. The targets stay reserved until `PullFinished` says otherwise."""

    key: SequenceKey
    kv: KVDescriptor
    copies: tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True)
class AbortPull:
    """Decode effect: stop soon; answered by `PullFinished` with an error, unless the pull had ended already."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Decode effect: tell the source's first rank that every block arrived. Lost releases are covered by the lease."""

    key: SequenceKey
    source: KVSource


@dataclass(frozen=True, slots=True)
class PullFinished:
    """Decode event, exactly one a `StartPull`; after it nothing writes into the targets.

    error: "" when every block was copied and verified.
    """

    key: SequenceKey
    error: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KVReleased:
    """Prefill event: the receiver has every block."""

    key: SequenceKey


SenderEffect = Publish | Withdraw
ReceiverEffect = StartPull | AbortPull | SendRelease
TransferEffect = SenderEffect | ReceiverEffect
TransferEvent = PullFinished | KVReleased


class KVSender(Protocol):
    """The prefill side of one rank: serves fetches on its own thread, out of the cache's memory."""

    @property
    def shard(self) -> KVShard: ...

    @property
    def is_alive(self) -> bool:
        """False when it was closed, or cannot go on."""
        ...

    def apply(self, effect: SenderEffect) -> None:
        """Never blocks."""
        ...

    def close(self) -> None: ...


class KVReceiver(Protocol):
    """The decode side of one rank: pulls on its own thread, into reserved blocks of the cache's memory."""

    @property
    def is_alive(self) -> bool:
        """False when it was closed, or cannot go on."""
        ...

    def apply(self, effect: ReceiverEffect) -> None:
        """Never blocks; the outcome of a pull comes as an event."""
        ...

    def counters(self) -> dict[str, float]:
        """Totals for /metrics: bytes, pulls and refused data by kind. Any thread."""
        ...

    def close(self) -> None: ...
