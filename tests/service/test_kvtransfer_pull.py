"""One pull under any order of answers, and the in-process transport. No socket, no thread."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import TransferError
from common.ids import BlockId, PeerId
from common.kv_layout import head_checksums
from common.kv_source import KVDescriptor
from common.shard_memory import ShardMemory
from common.wire import Buffer, KVBlocks
from kvtransfer.loopback import LoopbackReceiver, LoopbackSender
from kvtransfer.pull import Fetch, Pull
from kvtransfer.reshard import ShardPull
from kvtransfer.tcp import TcpRoute
from kvtransfer.transfer_counters import TransferCounters, receiver_counters
from kvtransfer.transport import (
    AbortPull,
    BlockCopy,
    KVReleased,
    Publish,
    PullFinished,
    SendRelease,
    StartPull,
    TransferEvent,
    Withdraw,
)
from tests.fakes import fake_source
from tests.service.kv_rig import BLOCK_BYTES, LAYOUT, block, key

NUM_BLOCKS = 8
SENT = memoryview(b"".join(bytes([number + 1]) * BLOCK_BYTES for number in range(NUM_BLOCKS)))
SOURCE = fake_source(PeerId("prefill#1"), LAYOUT, NUM_BLOCKS)
HEADS = range(LAYOUT.num_kv_heads)


def start_of(block_ids: Sequence[int]) -> StartPull:
    """Each block into the target of the same number."""
    ids = tuple(BlockId(block_id) for block_id in block_ids)
    checksums = tuple(head_checksums(block(SENT, block_id), LAYOUT.head_bytes) for block_id in ids)
    descriptor = KVDescriptor(source=SOURCE, num_tokens=16 * len(ids), block_ids=ids, checksums=checksums)
    copies = tuple(BlockCopy(each, each, heads) for each, heads in zip(ids, checksums, strict=True))
    return StartPull(key(1), descriptor, copies)


def pull_of(block_ids: Sequence[int], received: memoryview, counters: TransferCounters) -> Pull:
    """Of all heads from the one shard."""
    memory = ShardMemory(received, HEADS, LAYOUT.head_bytes)
    return Pull(start_of(block_ids), ShardPull(SOURCE.shards[0], HEADS), TcpRoute(), memory, counters)


def take(fetch: Fetch, message: KVBlocks, buffers: Sequence[Buffer]) -> int:
    """What a run that is here at once completes."""
    run = fetch.pull.begin(fetch, message, buffers)
    return fetch.pull.take(run.block_ids, run.read.blocks or ()) if run else 0


@st.composite
def answers(draw: st.DrawFn) -> tuple[KVBlocks, list[Buffer], bool]:
    """Any run, right or wrong, and whether it answers the newest fetch or the oldest."""
    first = draw(st.integers(0, 4))
    length = draw(st.integers(0, 4))
    start = draw(st.integers(0, NUM_BLOCKS - 1))
    ids = tuple(BlockId((start + offset) % NUM_BLOCKS) for offset in range(length))
    buffers: list[Buffer] = [bytes(block(SENT, block_id)) for block_id in ids]
    if draw(st.integers(0, 3)) == 0:
        spoiled = draw(st.sampled_from([b"", b"\0" * BLOCK_BYTES, b"\0" * (BLOCK_BYTES + 1)]))
        buffers = [*buffers, spoiled] if draw(st.booleans()) else [spoiled, *buffers[1:]]
    refusal = draw(st.sampled_from([""] * 20 + ["not held"]))
    request_id, attempt = key(1)
    message = KVBlocks(request_id=request_id, attempt=attempt, refusal=refusal, first=first, block_ids=ids)
    return message, buffers, draw(st.booleans())


@given(st.lists(answers(), max_size=40))
def test_a_pull_is_complete_only_when_every_target_is_right(
    runs: list[tuple[KVBlocks, list[Buffer], bool]],
) -> None:
    counters = receiver_counters()
    received = memoryview(bytearray(NUM_BLOCKS * BLOCK_BYTES))
    pull = pull_of(range(6), received, counters)
    fetches: list[Fetch] = []
    num_verified = 0
    for message, buffers, is_newest in runs:
        if pull.wants_more:
            fetches.append(pull.next_fetch(len(fetches), max_blocks=4))
        try:
            num_verified += take(fetches[-1 if is_newest else 0], message, buffers)
        except TransferError:
            return
        assert pull.num_bytes == num_verified * BLOCK_BYTES
        assert pull.is_complete == (num_verified == 6)
    for number in range(6, NUM_BLOCKS):
        assert not any(block(received, BlockId(number))), "a block that is not a target was written"
    if pull.is_complete:
        assert received[: 6 * BLOCK_BYTES] == SENT[: 6 * BLOCK_BYTES]


@given(st.permutations(range(6)), st.lists(st.integers(1, 4), min_size=6, max_size=6))
def test_honest_answers_in_runs_of_any_length_complete_a_pull(ids: list[int], lengths: list[int]) -> None:
    received = memoryview(bytearray(NUM_BLOCKS * BLOCK_BYTES))
    counters = receiver_counters()
    pull = pull_of(ids, received, counters)
    request_id, attempt = key(1)
    for number in range(6):
        if not pull.wants_more:
            break
        fetch = pull.next_fetch(number, max_blocks=4)
        while not fetch.is_answered:
            run = fetch.block_ids[fetch.next : fetch.next + lengths[number]]
            message = KVBlocks(request_id=request_id, attempt=attempt, refusal="", first=fetch.next, block_ids=run)
            assert take(fetch, message, [block(SENT, block_id) for block_id in run]) == len(run)
    assert pull.is_complete
    assert received[: 6 * BLOCK_BYTES] == SENT[: 6 * BLOCK_BYTES]
    assert not any(count for name, count in counters.totals().items() if "refused" in name)


class Loopback:
    """One sender and one receiver in this process."""

    def __init__(self) -> None:
        self.events: list[TransferEvent] = []
        self.received = memoryview(bytearray(NUM_BLOCKS * BLOCK_BYTES))
        self.sent = memoryview(bytearray(SENT))
        self.sender = LoopbackSender(SOURCE.shards[0], self.events.append, self.sent)
        self.senders = {SOURCE.peer: self.sender}
        self.receiver = LoopbackReceiver(self.senders, self.events.append, self.received)
        self.start = start_of(range(4))

    def begin(self) -> None:
        self.sender.apply(Publish(key(1), self.start.kv.block_ids))
        self.receiver.apply(self.start)


@pytest.fixture
def loopback() -> Loopback:
    loopback = Loopback()
    loopback.begin()
    return loopback


def error_of(loopback: Loopback) -> str:
    (event,) = loopback.events
    assert isinstance(event, PullFinished)
    return event.error


def test_loopback_copies_when_told_to(loopback: Loopback) -> None:
    assert not loopback.events
    loopback.receiver.complete(key(1))
    assert loopback.events == [PullFinished(key(1), "", 4 * BLOCK_BYTES)]
    assert loopback.received[: 4 * BLOCK_BYTES] == SENT[: 4 * BLOCK_BYTES]
    assert not any(loopback.received[4 * BLOCK_BYTES :])
    loopback.receiver.apply(SendRelease(key(1), SOURCE))
    loopback.receiver.apply(SendRelease(key(1), SOURCE))
    loopback.receiver.arrive_release()
    loopback.receiver.arrive_release()
    assert loopback.events[1:] == [KVReleased(key(1))]


def test_loopback_refuses_what_was_withdrawn(loopback: Loopback) -> None:
    loopback.sender.apply(Withdraw(key(1)))
    loopback.receiver.complete(key(1))
    assert "does not hold r1/0" in error_of(loopback)


def test_loopback_refuses_blocks_that_were_not_published(loopback: Loopback) -> None:
    foreign = replace(loopback.start, key=key(2))
    loopback.sender.apply(Publish(key(2), loopback.start.kv.block_ids[:2]))
    loopback.receiver.apply(foreign)
    loopback.receiver.complete(key(2))
    assert "does not hold r2/0" in error_of(loopback)


def test_loopback_finds_corrupt_bytes(loopback: Loopback) -> None:
    loopback.sent[2 * BLOCK_BYTES] ^= 1
    loopback.receiver.complete(key(1))
    assert "block 2 of the source is corrupt" in error_of(loopback)


def test_loopback_fails_pulls_of_a_dead_sender_and_aborted_ones(loopback: Loopback) -> None:
    loopback.senders.clear()
    loopback.receiver.complete(key(1))
    assert error_of(loopback) == "prefill#1 is not there"
    loopback.events.clear()
    loopback.receiver.apply(loopback.start)
    loopback.receiver.apply(AbortPull(key(1)))
    loopback.receiver.apply(AbortPull(key(1)))
    assert error_of(loopback) == "aborted"
    loopback.events.clear()
    loopback.receiver.apply(loopback.start)
    loopback.receiver.close()
    assert error_of(loopback) == "closed"
    assert loopback.receiver.counters()["kv_pulls_failed"] == 3
