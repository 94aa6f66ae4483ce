"""Every message between Baton's services, from -> to, and their encoding.

A message travels as `[header, *buffers]`: the header is MessagePack of
`[version, tag, sender, to, seq, fields]`, buffers are raw frames (KV blocks) that are never copied
into it. `decode` checks version, tag, field names, types and sizes. Nothing is ever unpickled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from enum import StrEnum

import msgspec

from common.errors import WireError
from common.ids import BlockId, PeerId, RequestId
from common.kv_layout import KVLayout
from common.kv_source import KVDescriptor
from common.sampling import FinishReason, SamplingParams
from common.wire_types import Address, Count, Seconds, TokenIds

WIRE_VERSION = 2
MAX_HEADER_BYTES = 16 * 2**20
"""A header over this is refused unread. A prompt of a million tokens takes about 5 MiB, and the checksums of its KV, in
blocks of 16 tokens with 8 heads, as much again."""
MAX_REASON_CHARS = 300
"""Of a `WireError`, which may name what a peer sent, and is logged."""
MIN_CONTEXT = 2
"""A prompt of one token, and one token of output."""

Buffer = bytes | bytearray | memoryview


class Role(StrEnum):
    """Which pool a worker belongs to. BOTH: to none, it computes prompts and goes on with them itself."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class EndReason(StrEnum):
    """Why a worker ended a request that its gateway did not cancel.

    PREEMPTED:      no KV blocks left; resume it, nothing went wrong
    DRAINING:       the worker is leaving; resume it elsewhere, nothing went wrong
    LINK_LOST:      messages of this gateway were lost, so the worker gave up what it had of it
    LEASE_EXPIRED:  the handoff was neither fetched nor renewed in time
    TRANSFER:       the KV could not be pulled or was not what the descriptor said
    UNKNOWN:        the gateway asked about something that the worker does not have
    TOO_LARGE:      can never fit into this worker's cache, or its model's context
    REFUSED:        names tokens that the model does not have
    FAILED:         this request broke the step (for example, its logits are not finite)
    """

    PREEMPTED = "preempted"
    DRAINING = "draining"
    LINK_LOST = "link_lost"
    LEASE_EXPIRED = "lease_expired"
    TRANSFER = "transfer"
    UNKNOWN = "unknown"
    TOO_LARGE = "too_large"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """worker -> every gateway, twice a second and never queued: who it is and what it has free.

    max_context:     tokens of the longest sequence that it can ever hold
    step_running_s:  since its loop has looked at its inbox, which it does between steps, and ten times a second
    step_expected_s: what a large step takes there
    counters:        totals since start and gauges, for the gateway's /metrics
    """

    name: str
    address: Address
    role: Role
    layout: KVLayout
    num_blocks: Count
    num_free_blocks: Count
    max_context: Count
    num_waiting: Count
    num_waiting_tokens: Count
    num_running: Count
    is_draining: bool
    step_running_s: Seconds
    step_expected_s: Seconds
    counters: dict[str, float]

    def __post_init__(self) -> None:
        """Raises: ValueError where no worker could say so; `decode` makes a WireError of it."""
        num_tokens = self.num_blocks * self.layout.block_size
        if not MIN_CONTEXT <= self.max_context <= num_tokens:
            raise ValueError(f"max_context must be {MIN_CONTEXT} to {num_tokens} (all blocks), got {self.max_context}")
        if self.num_free_blocks > self.num_blocks:
            raise ValueError(f"num_free_blocks must be at most {self.num_blocks}, got {self.num_free_blocks}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStatus:
    """gateway -> each of its workers, twice a second and never queued.

    leases: requests whose KV on this worker the gateway still wants, with their attempt: of this attempt as a handoff,
            of any attempt in the cache
    """

    name: str
    address: Address
    leases: tuple[tuple[RequestId, Count], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """gateway -> prefill or both: compute prompt and output tokens, sample the next one, hold the KV.

    age_s: since the request first arrived (clocks of two hosts are never compared).
    """

    request_id: RequestId
    attempt: Count
    prompt_token_ids: TokenIds
    output_token_ids: TokenIds
    sampling: SamplingParams
    age_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDone:
    """prefill or both -> gateway: the next token, and the KV of everything before it.

    index:             of token_id in the request's output
    num_cached_tokens: tokens whose KV was found in the prefix cache
    kv:                None when the request ended with this token, or the worker (BOTH) goes on with it itself
    """

    request_id: RequestId
    attempt: Count
    index: Count
    token_id: Count
    num_cached_tokens: Count
    finish_reason: FinishReason | None
    stop_token_id: int | None
    kv: KVDescriptor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """gateway -> decode: pull the KV, then continue after the last output token (whose KV nobody has yet)."""

    request_id: RequestId
    attempt: Count
    prompt_token_ids: TokenIds
    output_token_ids: TokenIds
    sampling: SamplingParams
    age_s: Seconds
    kv: KVDescriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensEntry:
    """New tokens of one sequence; index is the first one's in the request's output."""

    request_id: RequestId
    attempt: Count
    index: Count
    token_ids: TokenIds
    finish_reason: FinishReason | None
    stop_token_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """decode or both -> gateway, one a step: all new tokens of that gateway's sequences."""

    entries: tuple[TokensEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """gateway -> worker: drop this attempt and every earlier one, at whatever stage. Idempotent."""

    request_id: RequestId
    attempt: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """worker -> gateway: the worker gave this attempt up and holds nothing of it any more."""

    request_id: RequestId
    attempt: Count
    reason: EndReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBroken:
    """either -> either: messages of yours to me were lost; what was under way between us is void.

    last_missing: the highest sequence number that is known to be lost; 0 when it is not known
    """

    reason: str
    last_missing: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFetch:
    """decode -> prefill, data channel: send these heads of these blocks of a handoff.

    first_head, num_heads: of the model's KV heads, which the addressed rank must have.
    with_data: False when the receiver reads the bytes out of the cache by itself and only needs the permission.
    """

    request_id: RequestId
    attempt: Count
    block_ids: tuple[BlockId, ...]
    first_head: Count
    num_heads: Count
    with_data: bool

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBlocks:
    """prefill -> decode, data channel: a run of the fetched blocks.

    refusal:  why there are none ("" when granted): the handoff is not held (any more)
    first:    position in the fetch's block_ids of the first block here; runs may have any length

    The envelope's buffers hold one frame a block, the fetched heads side by side, or none when fetched without data.
    """

    request_id: RequestId
    attempt: Count
    refusal: str
    first: Count
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRelease:
    """decode -> prefill, data channel: every block arrived and was verified."""

    request_id: RequestId
    attempt: Count


Status = WorkerStatus | GatewayStatus
Control = PrefillRequest | PrefillDone | DecodeRequest | Tokens | Cancel | Ended | LinkBroken
Data = KVFetch | KVBlocks | KVRelease
Message = Status | Control | Data

_CLASSES: tuple[type[Message], ...] = (
    WorkerStatus,
    GatewayStatus,
    PrefillRequest,
    PrefillDone,
    DecodeRequest,
    Tokens,
    Cancel,
    Ended,
    LinkBroken,
    KVFetch,
    KVBlocks,
    KVRelease,
)
_BY_TAG = {cls.__name__: cls for cls in _CLASSES}


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message and how it travelled.

    to:   "" in a first status, when the addressee's incarnation is not known yet
    seq:  1, 2, 3 … per link; a status repeats the last one sent
    buffers: raw frames that travel behind the header, only with KVBlocks
    """

    sender: PeerId
    to: PeerId
    seq: int
    message: Message
    buffers: Sequence[Buffer] = ()


Header = tuple[int, str, PeerId, PeerId, Count, msgspec.Raw]
"""version, tag, sender, to, seq, fields; the fields are read when it is known what they must be."""

_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_decoders = {cls: msgspec.msgpack.Decoder(cls) for cls in _CLASSES}


def _with_any_values(cls: type[Message]) -> type[msgspec.Struct]:
    """Has these fields and no others, which a dataclass cannot say. What it does not know it does not read."""
    raw_fields = [(field.name, msgspec.Raw, msgspec.Raw()) for field in dataclass_fields(cls)]
    return msgspec.defstruct(cls.__name__, raw_fields, forbid_unknown_fields=True)


_name_decoders = {cls: msgspec.msgpack.Decoder(_with_any_values(cls)) for cls in _CLASSES}


def encode(envelope: Envelope) -> list[Buffer]:
    """Frames for one multipart send; buffers are passed on as they are, not copied."""
    message = envelope.message
    head = (WIRE_VERSION, type(message).__name__, envelope.sender, envelope.to, envelope.seq, message)
    return [_encoder.encode(head), *envelope.buffers]


def decode(frames: Sequence[Buffer]) -> Envelope:
    """Check and unpack what `encode` made.

    Raises: WireError naming message and field.
    """
    version, tag, sender, to, seq, fields = _unpack_header(frames)
    if version != WIRE_VERSION:
        raise WireError(f"wire version must be {WIRE_VERSION}, got {version}")
    cls = _BY_TAG.get(tag)
    if cls is None:
        raise _refusal(f"unknown message {tag!r}")
    buffers = frames[1:]
    if buffers and cls is not KVBlocks:
        raise WireError(f"{tag}: has no buffers, got {len(buffers)}")
    return Envelope(sender, to, seq, _to_message(cls, fields), buffers)


def _unpack_header(frames: Sequence[Buffer]) -> Header:
    if not frames:
        raise WireError("a message has at least one frame, got none")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise WireError(f"header must have at most {MAX_HEADER_BYTES} bytes, got {len(frames[0])}")
    try:
        return _header_decoder.decode(frames[0])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _refusal(f"header: {error}") from error


def _to_message(cls: type[Message], fields: msgspec.Raw) -> Message:
    try:
        _name_decoders[cls].decode(fields)
        return _decoders[cls].decode(fields)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _refusal(f"{cls.__name__}: {error}") from error


def _refusal(reason: str) -> WireError:
    return WireError(reason if len(reason) <= MAX_REASON_CHARS else f"{reason[:MAX_REASON_CHARS]}…")
