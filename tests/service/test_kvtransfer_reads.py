"""Reads that take their time: pulls end, routes fail and others begin while granted blocks are on their way."""

import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

import pytest

from common.errors import TransferError
from common.kv_source import KVShard, KVSource
from common.wire import Buffer, KVBlocks
from kvtransfer.route import Mode
from kvtransfer.shm import ShmRoute
from kvtransfer.transport import AbortPull
from tests.service.kv_rig import BLOCK_BYTES, DEADLINE_S, Rig, key

BLOCKS = range(10, 34)


class HeldRead:
    """Is done when its route lets it."""

    def __init__(self, route: "HeldRoute", blocks: Sequence[Buffer]) -> None:
        self.blocks: Sequence[Buffer] | None = None
        self._route = route
        self._blocks = blocks

    def advance(self) -> None:
        if self._route.has_failed.is_set():
            raise TransferError("the route failed")
        if self._route.may_end.is_set():
            self.blocks = self._blocks

    def close(self) -> None:
        assert self.blocks is not None, "closed before it was done"
        self._route.closed.put(self)


class HeldRoute:
    """Through shared memory, but not before the test says so. begun, closed: its reads."""

    name = "shm"
    with_data = False
    fetch_bytes = 4 * BLOCK_BYTES

    def __init__(self, source: KVSource, shard: KVShard) -> None:
        self.may_end = threading.Event()
        self.has_failed = threading.Event()
        self.begun: SimpleQueue[HeldRead] = SimpleQueue()
        self.closed: SimpleQueue[HeldRead] = SimpleQueue()
        self.is_closed = threading.Event()
        self._shm = ShmRoute(source, shard)

    def read(self, message: KVBlocks, buffers: Sequence[Buffer], heads: range) -> HeldRead:
        read = HeldRead(self, self._shm.read(message, buffers, heads).blocks)
        self.begun.put(read)
        return read

    def close(self) -> None:
        self.is_closed.set()


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> "SimpleQueue[HeldRoute]":
    """One a connection, in the order in which they are made."""
    made: SimpleQueue[HeldRoute] = SimpleQueue()

    def choose(_: Mode, source: KVSource, shard: KVShard) -> HeldRoute:
        made.put(route := HeldRoute(source, shard))
        return route

    monkeypatch.setattr("kvtransfer.puller.choose_route", choose)
    return made


@pytest.fixture
def rig(routes: "SimpleQueue[HeldRoute]") -> Iterator[Rig]:
    rig = Rig("shm")
    yield rig
    rig.close()


def begun(routes: "SimpleQueue[HeldRoute]", num_reads: int) -> HeldRoute:
    """The next route, once so many of its reads are under way."""
    route = routes.get(timeout=DEADLINE_S)
    for _ in range(num_reads):
        route.begun.get(timeout=DEADLINE_S)
    return route


def test_blocks_are_copied_when_their_reads_are_done(rig: Rig, routes: "SimpleQueue[HeldRoute]") -> None:
    start = rig.pull(key(1), BLOCKS)
    route = begun(routes, 4)  # the window
    rig.check_untouched()
    route.may_end.set()
    assert rig.wait(key(1)).error == ""
    rig.check_arrived(start)
    assert rig.counter("kv_received_blocks") == len(BLOCKS)
    for _ in range(6):
        route.closed.get(timeout=DEADLINE_S)


def test_an_aborted_pull_s_reads_end_without_touching_its_targets(rig: Rig, routes: "SimpleQueue[HeldRoute]") -> None:
    rig.pull(key(1), BLOCKS)
    route = begun(routes, 4)
    rig.puller.apply(AbortPull(key(1)))
    assert rig.wait(key(1)).error == "aborted"
    route.may_end.set()
    for _ in range(4):
        route.closed.get(timeout=DEADLINE_S)
    rig.check_untouched()
    start = rig.pull(key(2), BLOCKS)
    assert rig.wait(key(2)).error == ""
    rig.check_arrived(start)


def test_a_route_that_fails_ends_its_pulls_and_the_next_pull_makes_another(
    rig: Rig, routes: "SimpleQueue[HeldRoute]"
) -> None:
    rig.pull(key(1), BLOCKS[:4])
    rig.pull(key(2), [1])
    route = begun(routes, 2)
    route.has_failed.set()
    assert rig.wait(key(1)).error == "the route failed"
    assert rig.wait(key(2)).error == "the route failed"
    assert route.is_closed.wait(DEADLINE_S)
    rig.check_untouched()
    start = rig.pull(key(3), BLOCKS)
    begun(routes, 1).may_end.set()
    assert rig.wait(key(3)).error == ""
    rig.check_arrived(start)


def test_a_read_that_does_not_end_ends_its_pull_after_the_timeout(routes: "SimpleQueue[HeldRoute]") -> None:
    rig = Rig("shm", pull_timeout_s=0.2)
    try:
        rig.pull(key(1), BLOCKS)
        assert "no block from prefill#1 in 0.2 s" in rig.wait(key(1)).error
        rig.check_untouched()
    finally:
        rig.close()


def test_closing_ends_pulls_that_are_being_read(rig: Rig, routes: "SimpleQueue[HeldRoute]") -> None:
    rig.pull(key(1), BLOCKS)
    route = begun(routes, 4)
    rig.puller.close()
    assert "thread ended" in rig.wait(key(1)).error
    assert route.is_closed.is_set()
    rig.check_untouched()
