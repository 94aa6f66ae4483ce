"""The wire: every message survives a round trip, and nothing else gets through or does harm."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import WireError
from common.ids import PeerId, RequestId
from common.kv_source import MAX_AGENT_BYTES
from common.sampling import SamplingParams
from common.wire import (
    MAX_HEADER_BYTES,
    WIRE_VERSION,
    Cancel,
    DecodeRequest,
    Envelope,
    GatewayStatus,
    KVBlocks,
    PrefillDone,
    PrefillRequest,
    Role,
    decode,
    encode,
)
from tests.fakes import fake_layout, fake_source
from tests.unit.requests_rig import descriptor, status
from tests.unit.wire_messages import JSONISH, MESSAGE_TYPES, envelopes, header_of, pack


@given(envelopes)
@settings(max_examples=300)
def test_every_message_survives_a_round_trip(envelope: Envelope) -> None:
    assert decode(encode(envelope)) == replace(envelope, buffers=decode(encode(envelope)).buffers)
    assert not decode(encode(envelope)).buffers


def test_every_message_is_covered_by_these_tests() -> None:
    assert len(MESSAGE_TYPES) == len(set(MESSAGE_TYPES)) >= 12


def test_buffers_travel_uncopied_behind_kv_blocks_only() -> None:
    memory = memoryview(bytearray(b"abcdef"))
    blocks = KVBlocks(request_id=RequestId("r"), attempt=0, refusal="", first=0, block_ids=())
    frames = encode(Envelope(PeerId("a#1"), PeerId("b#1"), 0, blocks, [memory[:3], memory[3:]]))
    memory[0] = ord("x")
    assert [bytes(buffer) for buffer in decode(frames).buffers] == [b"xbc", b"def"]
    cancel = Cancel(request_id=RequestId("r"), attempt=0)
    with pytest.raises(WireError, match="Cancel: has no buffers, got 1"):
        decode(encode(Envelope(PeerId("a#1"), PeerId("b#1"), 1, cancel, [b"x"])))


@given(st.lists(st.binary(max_size=80), max_size=3))
@settings(max_examples=500)
def test_random_bytes_are_wire_errors(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


@given(JSONISH)
@settings(max_examples=300)
def test_random_messagepack_is_a_wire_error(header: Any) -> None:
    with pytest.raises(WireError):
        decode([pack(header)])


@given(envelopes, st.data())
@settings(max_examples=300)
def test_a_flipped_or_cut_header_is_a_wire_error_or_a_valid_message(envelope: Envelope, data: st.DataObject) -> None:
    header = bytearray(encode(envelope)[0])
    position = data.draw(st.integers(0, len(header) - 1))
    if data.draw(st.booleans()):
        header[position] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del header[position:]
    check_refused_or_valid(bytes(header))


@given(envelopes, JSONISH, st.data())
@settings(max_examples=300)
def test_a_wrong_field_is_a_wire_error_or_a_valid_message(envelope: Envelope, value: Any, data: st.DataObject) -> None:
    header = header_of(envelope)
    place = data.draw(st.integers(0, 5))
    if place < 5:
        header[place] = value
    elif header[5]:
        header[5][data.draw(st.sampled_from(sorted(header[5])))] = value
    check_refused_or_valid(pack(header))


def check_refused_or_valid(header: bytes) -> None:
    """What is let through must be something that could have been sent."""
    try:
        envelope = decode([header])
    except WireError:
        return
    again = decode(encode(envelope))
    assert repr(replace(again, buffers=())) == repr(replace(envelope, buffers=()))


@given(envelopes)
def test_unknown_and_missing_fields_are_named(envelope: Envelope) -> None:
    header = header_of(envelope)
    tag = header[1]
    header[5]["surprise"] = 1
    with pytest.raises(WireError, match=f"{tag}: Object contains unknown field `surprise`"):
        decode([pack(header)])
    del header[5]["surprise"]
    missing = next(iter(header[5]))
    del header[5][missing]
    with pytest.raises(WireError, match=f"{tag}.*{missing}"):
        decode([pack(header)])


def test_another_version_is_refused() -> None:
    header = header_of(Envelope(PeerId("a#1"), PeerId("b#1"), 1, Cancel(request_id=RequestId("r"), attempt=0)))
    header[0] = WIRE_VERSION + 1
    with pytest.raises(WireError, match=f"version must be {WIRE_VERSION}, got {WIRE_VERSION + 1}"):
        decode([pack(header)])


def test_negative_counts_are_refused_and_the_field_is_named() -> None:
    done = PrefillDone(
        request_id=RequestId("r"),
        attempt=0,
        index=-1,
        token_id=1,
        num_cached_tokens=0,
        finish_reason=None,
        stop_token_id=None,
        kv=None,
    )
    with pytest.raises(WireError, match=r"PrefillDone: .*>= 0.*index"):
        decode(encode(Envelope(PeerId("a#1"), PeerId("b#1"), 1, done)))


@pytest.mark.parametrize("address", ["", "nonsense", "inproc://x", "udp://1.2.3.4:5", "pgm://x", "tcp://" + "x" * 300])
def test_peers_are_only_found_at_tcp_and_ipc_addresses(address: str) -> None:
    status = GatewayStatus(name="g", address=address, leases=())
    with pytest.raises(WireError, match=r"GatewayStatus: .*address"):
        decode(encode(Envelope(PeerId("g#1"), PeerId(""), 0, status)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_context", value) for value in (-1, 0, 1, 401, 2**63)),
        *(("num_free_blocks", value) for value in (-1, 101)),
        *(("num_blocks", value) for value in (-1, 0, 99)),
        *(("num_waiting", value) for value in (-1, 0.5, None)),
        *(("step_running_s", value) for value in (-0.1, float("nan"))),
    ],
)
def test_a_worker_s_status_with_an_impossible_value_is_a_wire_error(field: str, value: object) -> None:
    """It has 100 blocks of 4 tokens. What it says bounds every request's context, so nonsense would stop them all."""
    header = header_of(Envelope(PeerId("p0#1"), PeerId(""), 0, status(PeerId("p0#1"), Role.PREFILL)))
    decode([pack(header)])
    header[5][field] = value
    with pytest.raises(WireError, match="WorkerStatus"):
        decode([pack(header)])


@pytest.mark.parametrize(
    "heads",
    [
        [],
        [(0, 1)],
        [(1, 1)],
        [(0, 3)],
        [(0, 2), (2, 1)],
        [(0, 1), (1, 0), (1, 1)],
        [(0, 1), (1, 2**62)],
        [(0, 2), (2**62, 1)],
    ],
)
def test_shards_that_lack_a_head_or_have_one_too_many_are_a_wire_error(heads: list[tuple[int, int]]) -> None:
    """The model has two heads. A receiver finds each of them at a shard without looking further."""
    header = header_of_request_of_two_heads()
    decode([pack(header)])
    (shard,) = header[5]["kv"]["source"]["shards"]
    header[5]["kv"]["source"]["shards"] = [
        {**shard, "first_head": first, "num_heads": num_heads} for first, num_heads in heads
    ]
    with pytest.raises(WireError, match="shards must have each of 2 heads"):
        decode([pack(header)])


def header_of_request_of_two_heads() -> list[Any]:
    """With one shard that has both."""
    layout = replace(fake_layout(), num_kv_heads=2)
    request = DecodeRequest(
        request_id=RequestId("r"),
        attempt=0,
        prompt_token_ids=(1,),
        output_token_ids=(2,),
        sampling=SamplingParams(max_tokens=2),
        age_s=0,
        kv=replace(descriptor(PeerId("p0#1"), 1), source=fake_source(PeerId("p0#1"), layout, num_blocks=1)),
    )
    return header_of(Envelope(PeerId("g#1"), PeerId("d0#1"), 1, request))


@pytest.mark.parametrize("agent", [b"x" * (MAX_AGENT_BYTES + 1), "text", None])
def test_a_shard_whose_agent_is_too_long_or_no_bytes_is_a_wire_error(agent: object) -> None:
    header = header_of_request_of_two_heads()
    (shard,) = header[5]["kv"]["source"]["shards"]
    shard["nixl_agent"] = b"x" * MAX_AGENT_BYTES
    decode([pack(header)])
    shard["nixl_agent"] = agent
    with pytest.raises(WireError, match=r"DecodeRequest: .*nixl_agent"):
        decode([pack(header)])


def test_a_shard_that_says_nothing_of_an_agent_has_none() -> None:
    header = header_of_request_of_two_heads()
    (shard,) = header[5]["kv"]["source"]["shards"]
    del shard["nixl_agent"], shard["nixl_address"]
    message = decode([pack(header)]).message
    assert isinstance(message, DecodeRequest)
    assert message.kv.source.shards[0].nixl_agent == b""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("top_k", value) for value in (-1, 2**31 + 1, 2**63)),
        *(("temperature", value) for value in (-1.0, float("nan"))),
        *(("seed", -1), ("max_tokens", -1), ("stop_token_ids", [-1]), ("logit_bias", [[-1, 1.0]])),
    ],
)
def test_sampling_that_no_tensor_could_hold_is_a_wire_error(field: str, value: object) -> None:
    request = PrefillRequest(
        request_id=RequestId("r"),
        attempt=0,
        prompt_token_ids=(1,),
        output_token_ids=(),
        sampling=SamplingParams(max_tokens=1),
        age_s=0,
    )
    header = header_of(Envelope(PeerId("g#1"), PeerId("p0#1"), 1, request))
    header[5]["sampling"][field] = value
    with pytest.raises(WireError, match=f"PrefillRequest: .*{field}"):
        decode([pack(header)])


def test_a_worker_s_blocks_hold_its_layout_s_tokens() -> None:
    header = header_of(Envelope(PeerId("p0#1"), PeerId(""), 0, status(PeerId("p0#1"), Role.PREFILL)))
    for block_size in (-4, 0, 3):
        header[5]["layout"]["block_size"] = block_size
        with pytest.raises(WireError, match="max_context"):
            decode([pack(header)])


def test_a_header_over_the_limit_is_not_even_unpacked() -> None:
    with pytest.raises(WireError, match="at most"):
        decode([bytes(MAX_HEADER_BYTES + 1)])


def test_deep_nesting_is_a_wire_error() -> None:
    with pytest.raises(WireError):
        decode([b"\x91" * 100_000])
