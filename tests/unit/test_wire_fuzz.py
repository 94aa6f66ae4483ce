"""Whatever comes instead of a message, the decoder refuses it by name, at once, and in little memory."""

import struct
import tracemalloc
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from common.errors import WireError
from common.wire import MAX_REASON_CHARS, WIRE_VERSION, Envelope, Message, decode, encode
from tests.unit.wire_messages import MESSAGE_TYPES, envelopes_of, header_of, pack
from tests.unit.wire_mutations import mutate

NUM_MESSAGES = 8
NUM_MESSAGES_OF_MANY = 1000
NUM_MUTATIONS = 50
"""Of one message."""
MEMORY_FACTOR = 48
"""Of what comes: two bytes may become a tuple of 56 and a pointer of 8, and lists grow by more than they need."""
MEMORY_BYTES = 50_000
"""Whatever comes: an exception with its traceback."""


def check(frames: Sequence[bytes]) -> Envelope | None:
    """Refused with a reason, or something that could have been sent; in memory of the order of the frames' size."""
    envelope, reason = None, ""
    tracemalloc.start()
    try:
        envelope = decode(frames)
    except WireError as error:
        reason = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(reason) <= MAX_REASON_CHARS + 1
    num_bytes = sum(map(len, frames))
    assert peak <= MEMORY_FACTOR * num_bytes + MEMORY_BYTES, f"{peak} bytes of memory for {num_bytes}"
    if envelope:
        assert repr(decode(encode(envelope))) == repr(envelope)
    return envelope


def fuzz(message_type: type[Message], num_messages: int) -> None:
    """Some of what comes out is valid, so it is not all refused for one and the same reason."""
    num_valid = 0

    @given(envelopes_of(message_type), st.lists(st.binary(max_size=20), max_size=2), st.integers(0, 2**32))
    @settings(max_examples=num_messages, deadline=None)
    def run(envelope: Envelope, buffers: list[bytes], seed: int) -> None:
        nonlocal num_valid
        random = Random(seed)
        for _ in range(NUM_MUTATIONS):
            frames = mutate([pack(header_of(envelope)), *buffers], random)
            note(f"{frames}")
            num_valid += check(frames) is not None

    run()
    assert 0 < num_valid < num_messages * NUM_MUTATIONS


@pytest.mark.parametrize("message_type", MESSAGE_TYPES, ids=lambda message_type: message_type.__name__)
def test_a_message_that_was_tampered_with_is_refused_or_valid(message_type: type[Message]) -> None:
    fuzz(message_type, NUM_MESSAGES)


@pytest.mark.full
@pytest.mark.parametrize("message_type", MESSAGE_TYPES, ids=lambda message_type: message_type.__name__)
def test_a_message_that_was_tampered_with_in_thousands_of_ways_is_refused_or_valid(
    message_type: type[Message],
) -> None:
    fuzz(message_type, NUM_MESSAGES_OF_MANY)


NUM_ITEMS = 2**14


def array_of(item: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", NUM_ITEMS) + item * NUM_ITEMS


def map_of(value: bytes) -> bytes:
    """Each name is another one."""
    items = (b"\xa3" + bytes([number >> 7 & 127, number & 127, 0]) + value for number in range(NUM_ITEMS))
    return b"\xdf" + struct.pack(">I", NUM_ITEMS) + b"".join(items)


def with_field(tag: str, name: str, value: bytes) -> bytes:
    return with_fields(tag, b"\x81" + pack(name) + value)


def with_fields(tag: str, fields: bytes) -> bytes:
    return b"\x96" + b"".join(map(pack, (WIRE_VERSION, tag, "a#1", "b#1", 1))) + fields


@pytest.mark.parametrize(
    "header",
    [
        with_field("GatewayStatus", "leases", array_of(b"\x92\xa0\x00")),
        with_field("WorkerStatus", "counters", map_of(b"\x00")),
        with_field("KVFetch", "block_ids", array_of(b"\xcd\x7f\x7f")),
        with_field("DecodeRequest", "kv", b"\x81" + pack("checksums") + array_of(b"\x90")),
        with_field("DecodeRequest", "kv", b"\x81" + pack("checksums") + array_of(b"\x91\x00")),
        with_field("PrefillRequest", "sampling", b"\x81" + pack("logit_bias") + array_of(b"\x92\x00\x00")),
        with_field("Tokens", "entries", array_of(b"\x80")),
        with_field("Cancel", "request_id", array_of(b"\x92\xa0\x00")),
        with_field("Cancel", "unknown", array_of(b"\x92\xa0\x00")),
        with_fields("Cancel", map_of(b"\x00")),
        with_fields("Cancel", array_of(b"\x00")),
        with_fields("nothing", map_of(b"\x00")),
        array_of(b"\x00"),
        map_of(b"\x00"),
    ],
    ids=lambda header: f"{header[:40]!r}"[2:-1],
)
def test_many_small_things_in_little_take_memory_in_proportion(header: bytes) -> None:
    assert check([header]) is None


@pytest.mark.parametrize("length", [0, 1, 100, 2**20])
def test_names_and_values_are_not_repeated_at_any_length(length: int) -> None:
    text = pack("x" * length)
    for header in (
        with_fields("x" * length, b"\x80"),
        with_fields("Cancel", b"\x81" + text + b"\x00"),
        with_field("Ended", "reason", text),
        with_field("GatewayStatus", "address", text),
    ):
        with pytest.raises(WireError) as error:
            decode([header])
        assert len(str(error.value)) <= MAX_REASON_CHARS + 1


def test_a_claimed_length_is_not_believed() -> None:
    for length in (2**16, 2**24, 2**32 - 1):
        for kind in (0xDD, 0xDF, 0xDB, 0xC6):
            claim = struct.pack(">BI", kind, length)
            for header in (claim, with_fields("Cancel", claim), with_field("KVFetch", "block_ids", claim)):
                assert check([header]) is None
            assert check([with_field("WorkerStatus", "counters", claim)]) is None
