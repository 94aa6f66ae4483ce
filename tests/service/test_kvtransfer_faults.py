"""A data channel that lies: whatever comes, a pull ends verified only with the right bytes in its targets."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import zmq

from common.ids import PeerId, RequestId
from common.wire import Envelope, KVRelease
from kvtransfer.route import Mode
from kvtransfer.transport import AbortPull
from tests.service.kv_rig import (
    BLOCK_BYTES,
    DEADLINE_S,
    MODES,
    Rig,
    blocks_of,
    change,
    key,
    set_fetch_bytes,
    with_buffers,
    with_shard,
)

BLOCKS = range(10, 34)
VICTIM = 21


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    set_fetch_bytes(monkeypatch, 4 * BLOCK_BYTES)


@pytest.fixture(params=MODES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.close()


@pytest.fixture(params=MODES)
def impatient_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    mode: Mode = request.param
    rig = Rig(mode, pull_timeout_s=0.4)
    yield rig
    rig.close()


def is_victim(envelope: Envelope) -> bool:
    return blocks_of(envelope).block_ids == (VICTIM,)


def flipped(rig: Rig, envelope: Envelope, position: int) -> Envelope:
    """One bit wrong: in the frame, or in the memory that is granted."""
    if rig.is_read:
        rig.sent[VICTIM * BLOCK_BYTES + position] ^= 4
        return envelope
    data = bytearray(envelope.buffers[0])
    data[position] ^= 4
    return with_buffers(envelope, [data])


@pytest.mark.parametrize("position", [0, BLOCK_BYTES // 2, BLOCK_BYTES - 1])
def test_a_flipped_bit_is_found_and_the_block_pulled_again(rig: Rig, position: int) -> None:
    num_seen = 0

    def flip_once(answer: list[Envelope]) -> list[Envelope]:
        nonlocal num_seen
        for index, envelope in enumerate(answer):
            if is_victim(envelope):
                num_seen += 1
                if num_seen == 1 or rig.is_read:  # in the sender's memory the second flip takes the first one back
                    answer[index] = flipped(rig, envelope, position)
        return answer

    rig.lie(flip_once)
    start = rig.pull(key(1), BLOCKS)
    assert rig.wait(key(1)).error == ""
    rig.check_arrived(start)
    assert rig.counter("kv_refused_corrupt") == 1
    assert rig.counter("kv_retried_blocks") == 1


def test_a_block_that_stays_corrupt_ends_the_pull(rig: Rig) -> None:
    is_flipped = False

    def flip(answer: list[Envelope]) -> list[Envelope]:
        nonlocal is_flipped
        for index, envelope in enumerate(answer):
            if is_victim(envelope) and not (rig.is_read and is_flipped):
                answer[index] = flipped(rig, envelope, 7)
                is_flipped = True
        return answer

    rig.lie(flip)
    rig.pull(key(1), BLOCKS)
    assert "block 21 of the source came wrong twice, now corrupt" in rig.wait(key(1)).error
    assert rig.counter("kv_refused_corrupt") == 2


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES + 1])
@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_frame_of_another_length_is_refused(rig: Rig, num_bytes: int, is_lasting: bool) -> None:
    """Where the receiver reads by itself any frame is one too many."""
    num_seen = 0

    def truncate(answer: list[Envelope]) -> list[Envelope]:
        nonlocal num_seen
        for index, envelope in enumerate(answer):
            if is_victim(envelope):
                num_seen += 1
                if num_seen == 1 or is_lasting:
                    answer[index] = with_buffers(envelope, [bytes(num_bytes)])
        return answer

    rig.lie(truncate)
    start = rig.pull(key(1), BLOCKS)
    error = rig.wait(key(1)).error
    if is_lasting:
        assert "block 21 of the source came wrong twice, now truncated" in error
    else:
        assert error == ""
        rig.check_arrived(start)
    assert rig.counter("kv_refused_truncated") == 1 + is_lasting


def test_a_missing_frame_is_refused() -> None:
    rig = Rig("tcp")
    try:
        rig.lie(lambda answer: [with_buffers(envelope, []) for envelope in answer])
        rig.pull(key(1), BLOCKS)
        assert "now truncated" in rig.wait(key(1)).error
        rig.check_untouched()
    finally:
        rig.close()


def test_frames_of_two_blocks_exchanged_are_found() -> None:
    rig = Rig("tcp")
    num_answers = 0

    def exchange(answer: list[Envelope]) -> list[Envelope]:
        nonlocal num_answers
        num_answers += 1
        if num_answers == 1:
            first, second, *rest = answer
            return [with_buffers(first, second.buffers), with_buffers(second, first.buffers), *rest]
        return answer

    try:
        rig.lie(exchange)
        start = rig.pull(key(1), BLOCKS)
        assert rig.wait(key(1)).error == ""
        rig.check_arrived(start)
        assert rig.counter("kv_refused_corrupt") == 2
    finally:
        rig.close()


def test_duplicates_are_dropped(rig: Rig) -> None:
    """The last ones come when their fetch is answered or the pull is over: those are stale."""
    rig.lie(lambda answer: [envelope for envelope in answer for _ in range(2)])
    start = rig.pull(key(1), BLOCKS)
    assert rig.wait(key(1)).error == ""
    rig.wait_counter("kv_refused_stale", len(BLOCKS) // 4)
    rig.check_arrived(start)
    assert rig.counter("kv_refused_duplicated") == len(BLOCKS) * 3 // 4
    assert rig.counter("kv_refused_stale") == len(BLOCKS) // 4
    assert rig.counter("kv_received_blocks") == len(BLOCKS)


def test_reordered_runs_are_dropped_and_pulled_again(rig: Rig) -> None:
    num_answers = 0

    def reverse_once(answer: list[Envelope]) -> list[Envelope]:
        nonlocal num_answers
        num_answers += 1
        return answer[::-1] if num_answers == 1 else answer

    rig.lie(reverse_once)
    start = rig.pull(key(1), BLOCKS)
    assert rig.wait(key(1)).error == ""
    rig.check_arrived(start)
    assert rig.counter("kv_refused_reordered") == 1
    assert rig.counter("kv_refused_stale") == 3
    assert rig.counter("kv_retried_blocks") == 4


def test_lasting_disorder_ends_the_pull(rig: Rig) -> None:
    rig.lie(lambda answer: answer[::-1])
    rig.pull(key(1), BLOCKS)
    assert "now reordered" in rig.wait(key(1)).error


def test_data_of_another_attempt_is_dropped(impatient_rig: Rig) -> None:
    rig = impatient_rig
    rig.lie(lambda answer: [change(envelope, attempt=1) for envelope in answer])
    rig.pull(key(1), BLOCKS)
    assert "no block from" in rig.wait(key(1)).error
    rig.check_untouched()
    assert rig.counter("kv_refused_stale") == 16  # the window


def test_data_of_another_request_or_incarnation_is_dropped(impatient_rig: Rig) -> None:
    rig = impatient_rig

    def disguise(answer: list[Envelope]) -> list[Envelope]:
        return [
            *[change(envelope, request_id=RequestId("other")) for envelope in answer],
            *[replace(envelope, sender=PeerId("prefill#0")) for envelope in answer],
            *[replace(envelope, to=PeerId("decode#0")) for envelope in answer],
            *[replace(envelope, seq=envelope.seq + 1000) for envelope in answer],
        ]

    rig.lie(disguise)
    rig.pull(key(1), BLOCKS)
    assert "no block from" in rig.wait(key(1)).error
    rig.check_untouched()
    assert rig.counter("kv_refused_stale") == 4 * 16


def test_blocks_that_were_not_asked_for_are_dropped(impatient_rig: Rig) -> None:
    rig = impatient_rig

    def disguise(answer: list[Envelope]) -> list[Envelope]:
        request_id, attempt = key(1)
        return [
            *[change(envelope, first=blocks_of(envelope).first + 1) for envelope in answer],
            *[change(envelope, first=1000) for envelope in answer],
            *[change(envelope, block_ids=(60,)) for envelope in answer],
            *[change(envelope, block_ids=()) for envelope in answer],
            replace(answer[0], message=KVRelease(request_id=request_id, attempt=attempt), buffers=()),
        ]

    rig.lie(disguise)
    rig.pull(key(1), BLOCKS)
    assert "no block from" in rig.wait(key(1)).error
    rig.check_untouched()
    assert rig.counter("kv_refused_unasked") == 4 * 16 + 4


def test_late_data_does_not_touch_the_targets(rig: Rig) -> None:
    held: list[Envelope] = []

    def hold(answer: list[Envelope]) -> list[Envelope]:
        with rig.events.changed:
            held.extend(answer)
            rig.events.changed.notify_all()
        return []

    proxy = rig.lie(hold)
    rig.pull(key(1), BLOCKS)
    rig.events.wait_for(lambda: len(held) == 16)
    rig.puller.apply(AbortPull(key(1)))
    assert rig.wait(key(1)).error == "aborted"
    proxy.send_later(held)
    rig.wait_counter("kv_refused_stale", 16)
    rig.check_untouched()
    assert rig.counter("kv_refused_stale") == 16
    assert len(rig.events.finished(key(1))) == 1


def test_late_data_of_a_first_pull_is_not_taken_for_a_second_one(rig: Rig) -> None:
    held: list[Envelope] = []

    def hold(answer: list[Envelope]) -> list[Envelope]:
        with rig.events.changed:
            held.extend(answer)
            rig.events.changed.notify_all()
        return []

    proxy = rig.lie(hold)
    start = rig.pull(key(1), range(10, 18))
    rig.events.wait_for(lambda: len(held) == 8)
    rig.puller.apply(AbortPull(key(1)))
    rig.puller.apply(start)
    rig.events.wait_for(lambda: len(held) == 16)
    proxy.send_later(held[:8])
    rig.wait_counter("kv_refused_stale", 8)
    rig.check_untouched()
    proxy.send_later(held[8:])
    rig.events.wait_for(lambda: len(rig.events.finished(key(1))) == 2)
    assert [event.error for event in rig.events.finished(key(1))] == ["aborted", ""]
    rig.check_arrived(start)


def test_garbage_on_the_data_channel_is_counted() -> None:
    rng = random.Random(0)
    context = zmq.Context()
    source = context.socket(zmq.ROUTER)
    source.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
    source.bind("ipc://*")
    rig = Rig("tcp", pull_timeout_s=0.5)
    try:
        address = source.getsockopt_string(zmq.LAST_ENDPOINT)
        rig.pull(key(1), BLOCKS, with_shard(rig.source, data_address=address))
        receiver, _ = source.recv_multipart()
        for _ in range(100):
            source.send_multipart([receiver, *(rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(1, 4)))])
        assert "no block from" in rig.wait(key(1)).error
        rig.check_untouched()
        assert rig.counter("kv_refused_malformed") == 100
    finally:
        rig.close()
        context.destroy(linger=0)
