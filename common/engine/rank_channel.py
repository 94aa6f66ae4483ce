"""What the ranks of a worker group say to each other: an ordered log from rank 0 to every other one, and its answers.

A socket pair a rank; both ends are processes of one start, so what goes over it is trusted and checked for type only.
Collectives do not go this way; see kernels/group.py.
"""

import functools
import socket
import struct
import threading
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from common.engine.step import ScheduledSequence, StepPlan
from common.ids import BlockId, RequestId, SequenceKey
from common.kv_layout import HeadChecksums
from common.sampling import SamplingParams

_LENGTH = struct.Struct("<I")


class Join(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First entry: what rank 0 decided. The rest is in the command line, which is rank 0's own.

    peer:       of the group
    num_blocks: of the cache; 0: what all ranks have room for, which they say by `Room` and are told by `CacheSize`
    memory_fd:  of the group's shared memory, inherited
    torch_port: where the ranks meet for collectives of torch.distributed; 0: they go through shared memory
    """

    rank: int
    peer: str
    num_blocks: int
    memory_fd: int
    torch_port: int


class CacheSize(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answers every rank's `Room`."""

    num_blocks: int


class StepPart(msgspec.Struct, frozen=True, array_like=True):
    """A `ScheduledSequence`, as far as it concerns who does not sample."""

    token_ids: list[int]
    start: int
    block_table: list[BlockId]
    is_sampled: bool
    seal: list[BlockId]


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute our part of a step. Answered by `Sealed` if blocks are sealed in it."""

    parts: list[StepPart]


class Claim(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A step follows soon: cores on loan are wanted back."""


class Rest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """There is no next step yet."""


class Transfer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An effect for our side of the KV transfer, as kvtransfer/group.py encodes it; is_answered: by `Applied`."""

    effect: bytes
    is_answered: bool


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Last entry. A log that ends without it means that rank 0 has died."""


class Room(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The weights are loaded. num_blocks: of KV that fit beside them."""

    num_blocks: int


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The model is loaded. shard: what our side of the KV transfer says of itself, encoded."""

    shard: bytes


class Sealed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Checksums of the step's sealed blocks, in the plan's order: one of each of our KV heads."""

    checksums: list[HeadChecksums]


class Applied(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A transfer effect was carried out."""


class TransferEvent(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What our side of the KV transfer reports, encoded."""

    event: bytes


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This rank ends, and why. is_unusable: what the operator gave is; trying again is pointless."""

    reason: str
    is_unusable: bool


Entry = Join | CacheSize | Step | Claim | Rest | Transfer | Stop
Reply = Room | Ready | Sealed | Applied | TransferEvent | Failed

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class RankChannel(Generic[Sent, Received]):
    """One end. Any thread may send, one receives."""

    def __init__(self, end: socket.socket, decoder: "msgspec.msgpack.Decoder[Received]") -> None:
        """Owns the socket from now on, a stream."""
        self._socket = end
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder

    def send(self, message: Sent) -> None:
        """Blocks while the other end does not read. Raises: OSError when it is gone, or has not read for too long."""
        with self._lock:
            data = self._encoder.encode(message)
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Received | None:
        """The next message; None when the other end is gone, or has broken off in the middle of one."""
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        data = self._read(_LENGTH.unpack(head)[0])
        return None if data is None else self._decoder.decode(data)

    def _read(self, num_bytes: int) -> bytes | None:
        data = bytearray()
        while len(data) < num_bytes:
            try:
                piece = self._socket.recv(num_bytes - len(data))
            except ConnectionError:
                return None
            if not piece:
                return None
            data += piece
        return bytes(data)

    @property
    def fileno(self) -> int:
        return self._socket.fileno()

    def close_writing(self) -> None:
        """The other end sees that no more comes. Any thread; idempotent."""
        with suppress(OSError):  # it is gone already
            self._socket.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """Whoever is blocked in it, here or at the other end, sees its end. Any thread; idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the socket, which nobody uses any more."""
        self._socket.close()


Rank0End = RankChannel[Entry, Reply]
RankEnd = RankChannel[Reply, Entry]


def end_of_rank_0(end: socket.socket, send_s: float) -> Rank0End:
    """send_s: how long to wait for a rank that reads nothing, until sending to it is an error."""
    whole_s = int(send_s)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole_s, int((send_s - whole_s) * 1e6)))
    return RankChannel(end, msgspec.msgpack.Decoder(Reply))


def end_of_rank(end: socket.socket) -> RankEnd:
    return RankChannel(end, msgspec.msgpack.Decoder(Entry))


def to_step(plan: StepPlan) -> Step:
    return Step(
        [
            StepPart(
                token_ids=list(sequence.token_ids),
                start=sequence.start,
                block_table=list(sequence.block_table),
                is_sampled=sequence.sampling is not None,
                seal=list(sequence.seal),
            )
            for sequence in plan.sequences
        ]
    )


@functools.cache
def _key(index: int) -> SequenceKey:
    return SequenceKey(RequestId(str(index)), 0)


_SAMPLED = SamplingParams(max_tokens=1, temperature=0.0)


def to_plan(step: Step) -> StepPlan:
    """The plan as rank 0 has it, less what only sampling needs."""
    return StepPlan(
        tuple(
            ScheduledSequence(
                key=_key(index),
                token_ids=part.token_ids,
                start=part.start,
                block_table=part.block_table,
                sampling=_SAMPLED if part.is_sampled else None,
                prompt_token_ids=(),
                output_token_ids=(),
                seal=part.seal,
            )
            for index, part in enumerate(step.parts)
        )
    )


def agree_on_blocks(channel: RankEnd, num_blocks: int) -> int:
    """From the blocks that we have room for to those of all ranks. Raises: BrokenPipeError when rank 0 is gone."""
    channel.send(Room(num_blocks))
    match channel.receive():
        case CacheSize(agreed):
            return agreed
        case _:
            raise BrokenPipeError("rank 0 is gone, or gives up")
