"""KV transfer between a real server and a real puller, the same stories over every transport."""

import os
import random
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import zmq

from common.ids import BlockId, PeerId
from common.shard_memory import ShardMemory
from common.wire import Envelope, KVFetch, KVRelease, encode
from kvtransfer.puller import KVPuller
from kvtransfer.route import Mode
from kvtransfer.transport import AbortPull, KVReleased, SendRelease, Withdraw
from tests.service.kv_rig import (
    BLOCK_BYTES,
    DEADLINE_S,
    LAYOUT,
    MODES,
    NUM_BLOCKS,
    Events,
    Rig,
    key,
    set_fetch_bytes,
    with_shard,
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many fetches and runs a pull, as with real block sizes."""
    set_fetch_bytes(monkeypatch, 4 * BLOCK_BYTES)
    monkeypatch.setattr("kvtransfer.server.RUN_BYTES", 2 * BLOCK_BYTES)


@pytest.fixture(params=MODES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.close()


def test_a_pull_brings_every_block_and_writes_nothing_else(rig: Rig) -> None:
    start = rig.pull(key(1), range(5, 45))
    finished = rig.wait(key(1))
    assert (finished.error, finished.num_bytes) == ("", 40 * BLOCK_BYTES)
    rig.check_arrived(start)
    assert rig.counter("kv_received_blocks") == 40
    rig.server.close()  # its counters are final now
    assert rig.counter(f"kv_received_bytes_{rig.mode}") == 40 * BLOCK_BYTES
    assert rig.server.counters()["kv_sent_bytes"] == (0 if rig.is_read else 40 * BLOCK_BYTES)


def test_pulls_of_one_source_are_served_in_turn(rig: Rig) -> None:
    for number in range(8):
        rig.pull(key(number), range(number * 8, number * 8 + 8))
    for number in range(8):
        assert rig.wait(key(number)).error == ""
    finished = [event.key for event in rig.events.all if not isinstance(event, KVReleased)]
    assert finished == [key(number) for number in range(8)]
    for number in range(8):
        ids = range(number * 8, number * 8 + 8)
        for source, target in zip(ids, reversed(ids), strict=True):
            span = slice(target * BLOCK_BYTES, (target + 1) * BLOCK_BYTES)
            assert rig.received[span] == rig.sent[source * BLOCK_BYTES : (source + 1) * BLOCK_BYTES]


def test_a_pull_of_nothing_is_finished_at_once(rig: Rig) -> None:
    rig.pull(key(1), [])
    assert rig.wait(key(1)).error == ""


def test_a_release_is_reported_once(rig: Rig) -> None:
    rig.pull(key(1), [1])
    assert rig.wait(key(1)).error == ""
    rig.puller.apply(SendRelease(key(1), rig.source))
    rig.puller.apply(SendRelease(key(1), rig.source))
    rig.puller.apply(SendRelease(key(9), rig.source))
    rig.pull(key(2), [2])
    assert rig.wait(key(2)).error == ""
    assert [event for event in rig.events.all if isinstance(event, KVReleased)] == [KVReleased(key(1))]


def test_a_key_that_is_not_held_is_refused(rig: Rig) -> None:
    start = rig.start(key(1), [1, 2])
    rig.server.apply(Withdraw(key(1)))
    rig.server.apply(Withdraw(key(1)))
    rig.puller.apply(start)
    assert "does not hold r1/0" in rig.wait(key(1)).error
    rig.check_untouched()


def test_blocks_of_somebody_else_are_refused(rig: Rig) -> None:
    start = rig.start(key(1), [1, 2])
    rig.start(key(2), [3])
    foreign = replace(start.copies[0], source=BlockId(3))
    rig.puller.apply(replace(start, copies=(*start.copies, foreign)))
    assert "blocks [3] are not part of it" in rig.wait(key(1)).error
    rig.check_untouched()


def test_another_incarnation_at_the_address_refuses(rig: Rig) -> None:
    rig.pull(key(1), [1], with_shard(rig.source, peer=PeerId("prefill#0")))
    assert "this is prefill#1, not prefill#0" in rig.wait(key(1)).error


def test_layouts_are_compared_field_by_field_and_both_sides_named(rig: Rig) -> None:
    other = replace(LAYOUT, dtype="bfloat16", model_hash="other")
    rig.pull(key(1), [1], replace(rig.source, layout=other))
    error = rig.wait(key(1)).error
    assert "decode#1 != prefill#1" in error
    assert "dtype: 'float32' != 'bfloat16'" in error
    assert "model_hash: 'test-model' != 'other'" in error


def test_a_withdrawal_in_the_middle_ends_the_pull(rig: Rig) -> None:
    def withdraw(answer: list[Envelope]) -> list[Envelope]:
        rig.server.apply(Withdraw(key(1)))
        return answer

    rig.lie(withdraw)
    rig.pull(key(1), range(NUM_BLOCKS))
    assert "refused" in rig.wait(key(1)).error


def test_a_sender_s_death_in_the_middle_ends_the_pull(rig: Rig) -> None:
    first_answer = threading.Event()

    def swallow(answer: list[Envelope]) -> list[Envelope]:
        first_answer.set()
        return []

    proxy = rig.lie(swallow)
    rig.pull(key(1), range(NUM_BLOCKS))
    assert first_answer.wait(DEADLINE_S)
    proxy.close()
    assert "broke" in rig.wait(key(1)).error
    rig.check_untouched()
    assert rig.counter("kv_pulls_failed") == 1


def test_a_sender_that_is_dead_already_ends_the_pull_at_once(rig: Rig) -> None:
    rig.server.close()
    rig.pull(key(1), [1])
    assert "cannot connect to prefill#1" in rig.wait(key(1)).error


def test_an_address_that_is_none_ends_the_pull(rig: Rig) -> None:
    rig.pull(key(1), [1], with_shard(rig.source, data_address="nonsense"))
    assert "cannot connect to 'nonsense'" in rig.wait(key(1)).error


def test_sources_beyond_the_limit_are_refused_and_the_others_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.puller.max_connections", lambda *_: 1)
    rig = Rig("tcp")
    try:
        rig.pull(key(1), [1])
        assert rig.wait(key(1)).error == ""
        rig.pull(key(2), [2], with_shard(rig.source, peer=PeerId("prefill#2")))
        assert "there are 1 sources already" in rig.wait(key(2)).error
        rig.pull(key(3), [3])
        assert rig.wait(key(3)).error == ""
    finally:
        rig.close()


def test_repeated_source_blocks_end_the_pull(rig: Rig) -> None:
    rig.pull(key(1), [1, 2, 1])
    assert "each block can be pulled once" in rig.wait(key(1)).error


@pytest.mark.parametrize("mode", MODES)
def test_a_silent_source_ends_the_pull_after_the_timeout(mode: Mode) -> None:
    rig = Rig(mode, pull_timeout_s=0.2)
    try:
        rig.lie(lambda answer: [])
        rig.pull(key(1), range(NUM_BLOCKS))
        rig.pull(key(2), [1])
        assert "no block from prefill#1 in 0.2 s" in rig.wait(key(1)).error
        assert "no block from prefill#1 in 0.2 s" in rig.wait(key(2)).error
        rig.check_untouched()
    finally:
        rig.close()


def test_an_abort_in_the_middle_ends_the_pull_and_the_next_one_works(rig: Rig) -> None:
    first_answer = threading.Event()

    def look(answer: list[Envelope]) -> list[Envelope]:
        first_answer.set()
        return [] if rig.events.finished(key(1)) == [] else answer

    rig.lie(look)
    rig.pull(key(1), range(16))
    assert first_answer.wait(DEADLINE_S)
    rig.puller.apply(AbortPull(key(1)))
    rig.puller.apply(AbortPull(key(1)))
    assert rig.wait(key(1)).error == "aborted"
    start = rig.pull(key(2), range(16, 32))
    assert rig.wait(key(2)).error == ""
    rig.check_arrived(start)


def test_closing_ends_the_pulls_under_way(rig: Rig) -> None:
    rig.lie(lambda answer: [])
    rig.pull(key(1), range(NUM_BLOCKS))
    rig.puller.close()
    assert "thread ended" in rig.wait(key(1)).error
    rig.puller.close()
    assert not rig.puller.is_alive


@pytest.mark.parametrize("mode", MODES)
def test_random_pulls_and_aborts_each_finish_once_and_leak_nothing(mode: Mode) -> None:
    def run(num_pulls: int, seed: int) -> None:
        rng = random.Random(seed)
        rig = Rig(mode)
        try:
            under_way: list[int] = []
            for number in range(num_pulls):
                first = rng.randrange(NUM_BLOCKS)
                rig.pull(key(number), range(first, min(NUM_BLOCKS, first + rng.randrange(24))))
                under_way.append(number)
                if rng.random() < 0.3:
                    rig.puller.apply(AbortPull(key(rng.choice(under_way))))
                if rng.random() < 0.1:
                    rig.server.apply(Withdraw(key(rng.choice(under_way))))
                if rng.random() < 0.1:
                    rig.wait(key(number))
            for number in range(num_pulls):
                rig.wait(key(number))
            rig.pull(key(num_pulls), [1])
            assert rig.wait(key(num_pulls)).error == ""
            errors = [rig.wait(key(number)).error for number in range(num_pulls)]
            assert "" in errors
            assert "aborted" in errors
            assert rig.counter("kv_pulls") == num_pulls + 1
            assert rig.counter("kv_pulls_failed") == num_pulls - errors.count("")
            assert rig.counter("kv_refused_corrupt") == 0
        finally:
            rig.close()

    run(20, seed=1)  # starts pyzmq's own thread
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    run(200, seed=2)
    assert threading.active_count() == before[0]
    assert len(os.listdir("/proc/self/fd")) <= before[1]


def test_a_connection_that_is_not_used_is_closed() -> None:
    context = zmq.Context()
    source = context.socket(zmq.ROUTER)
    source.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
    source.bind("ipc://*")
    monitor = source.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    rig = Rig("tcp", idle_s=0.05)
    try:
        address = source.getsockopt_string(zmq.LAST_ENDPOINT)
        rig.puller.apply(SendRelease(key(1), with_shard(rig.source, data_address=address)))
        assert len(source.recv_multipart()) == 2
        assert monitor.poll(int(DEADLINE_S * 1000)), "the connection stays"
        assert rig.pull(key(2), [1])
        assert rig.wait(key(2)).error == ""
    finally:
        rig.close()
        source.disable_monitor()
        context.destroy(linger=0)


def test_a_receiver_that_asks_and_does_not_read_piles_nothing_up() -> None:
    rig = Rig("tcp")
    context = zmq.Context()
    try:
        rig.start(key(1), range(NUM_BLOCKS))
        greedy = context.socket(zmq.DEALER)
        greedy.setsockopt(zmq.RCVHWM, 1)
        greedy.connect(rig.source.shards[0].data_address)
        request_id, attempt = key(1)
        ids = tuple(BlockId(number) for number in range(NUM_BLOCKS))
        fetch = KVFetch(
            request_id=request_id, attempt=attempt, block_ids=ids, first_head=0, num_heads=2, with_data=True
        )
        release = KVRelease(request_id=request_id, attempt=attempt)
        for message in [*[fetch] * 200, release]:
            greedy.send_multipart(encode(Envelope(PeerId("greedy#1"), rig.source.peer, 1, message)))
        rig.events.wait_for(lambda: rig.events.num_released(key(1)))
        assert rig.server.counters()["kv_fetches_undeliverable"] > 0
        rig.pull(key(2), range(NUM_BLOCKS))
        assert rig.wait(key(2)).error == ""
    finally:
        rig.close()
        context.destroy(linger=0)


def test_a_server_survives_garbage() -> None:
    rig = Rig("tcp")
    context = zmq.Context()
    try:
        rng = random.Random(0)
        hostile = context.socket(zmq.DEALER)
        hostile.connect(rig.source.shards[0].data_address)
        for _ in range(200):
            hostile.send_multipart([rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(1, 4))])
        rig.start(key(1), [])
        release = KVRelease(request_id=key(1).request_id, attempt=0)
        hostile.send_multipart(encode(Envelope(PeerId("x#1"), PeerId("prefill#0"), 0, release)))
        hostile.send_multipart(encode(Envelope(PeerId("x#1"), rig.source.peer, 0, release)))
        rig.events.wait_for(lambda: rig.events.num_released(key(1)))
        assert rig.server.counters()["kv_refused_malformed"] == 201
    finally:
        rig.close()
        context.destroy(linger=0)


def test_two_receivers_pull_from_one_source(rig: Rig) -> None:
    events = Events()
    memory = memoryview(bytearray(NUM_BLOCKS * BLOCK_BYTES))
    other = KVPuller(PeerId("decode#2"), ShardMemory(memory, range(2), LAYOUT.head_bytes), LAYOUT, events.deliver)
    try:
        start = rig.start(key(2), range(NUM_BLOCKS))
        rig.pull(key(1), range(NUM_BLOCKS))
        other.apply(start)
        assert rig.wait(key(1)).error == ""
        events.wait_for(lambda: events.finished(key(2)))
        assert events.finished(key(2))[0].error == ""
        assert memory == rig.received
    finally:
        other.close()
