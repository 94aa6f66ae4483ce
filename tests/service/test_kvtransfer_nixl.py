"""What only NIXL does: reads under way when something ends, sources that die, and a package that is missing."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue

import pytest

from bench.inside.handoff_source import serve
from common.errors import ConfigError, TransferError
from common.ids import BlockId, PeerId, SequenceKey
from common.kv_source import KVDescriptor, KVSource
from common.shard_memory import ShardMemory
from common.wire import Envelope
from kvtransfer.nixl import RegisteredMemory
from kvtransfer.nixl_agent import PACKAGE, NixlAgent, Span
from kvtransfer.puller import KVPuller
from kvtransfer.route import choose_route
from kvtransfer.transport import AbortPull, BlockCopy, Publish, SenderEffect, StartPull, Withdraw
from tests.service.kv_rig import (
    BLOCK_BYTES,
    DEADLINE_S,
    LAYOUT,
    NEEDS_NIXL,
    NUM_BLOCKS,
    UNTOUCHED,
    Events,
    Proxy,
    Rig,
    key,
    with_shard,
)

BLOCKS = range(10, 34)


def test_without_nixl_workers_that_need_it_do_not_start() -> None:
    code = f"""
import sys
sys.modules[{PACKAGE!r}] = None
import baton
print([baton.main([role, "--kv-transport=nixl"]) for role in ("prefill", "decode")])
"""
    argv = [sys.executable, "-c", code]
    ended = subprocess.run(argv, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert ended.stdout == "[2, 2]\n"
    assert ended.stderr.count("--kv-transport nixl: needs NIXL, of the extra `nixl`") == 2


def test_a_source_without_an_agent_is_not_read() -> None:
    rig = Rig("tcp")
    try:
        with pytest.raises(TransferError, match="prefill#1 has no NIXL agent"):
            choose_route("nixl", rig.source, rig.source.shards[0])
    finally:
        rig.close()


@NEEDS_NIXL
def test_a_source_with_an_agent_serves_others_as_well() -> None:
    rig = Rig("nixl")
    events = Events()
    memory = ShardMemory(memoryview(bytearray(NUM_BLOCKS * BLOCK_BYTES)), range(2), LAYOUT.head_bytes)
    other = KVPuller(PeerId("decode#2"), memory, LAYOUT, events.deliver, "auto")
    try:
        other.apply(rig.start(key(1), BLOCKS))
        events.wait_for(lambda: events.finished(key(1)))
        assert events.finished(key(1))[0].error == ""
        assert other.counters()["kv_received_bytes_tcp"] == len(BLOCKS) * BLOCK_BYTES
    finally:
        other.close()
        rig.close()


@NEEDS_NIXL
@pytest.mark.parametrize("agent", [b"", b"nonsense"])
def test_an_agent_that_is_none_ends_the_pull_and_the_next_one_works(agent: bytes) -> None:
    rig = Rig("nixl")
    try:
        rig.pull(key(1), BLOCKS, with_shard(rig.source, nixl_agent=agent))
        assert "NIXL" in rig.wait(key(1)).error
        start = rig.pull(key(2), BLOCKS)
        assert rig.wait(key(2)).error == ""
        rig.check_arrived(start)
    finally:
        rig.close()


@NEEDS_NIXL
@pytest.mark.parametrize("offset", [NUM_BLOCKS * BLOCK_BYTES, -(2**20)])
def test_memory_that_is_not_registered_is_not_read(offset: int) -> None:
    rig = Rig("nixl")
    try:
        address = rig.source.shards[0].nixl_address
        rig.pull(key(1), BLOCKS, with_shard(rig.source, nixl_address=address + offset))
        assert "prefill#1: NIXL: cannot read" in rig.wait(key(1)).error
        rig.check_untouched()
        start = rig.pull(key(2), BLOCKS)
        assert rig.wait(key(2)).error == ""
        rig.check_arrived(start)
    finally:
        rig.close()


@NEEDS_NIXL
def test_an_agent_that_takes_too_many_bytes_to_describe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.nixl.MAX_AGENT_BYTES", 100)
    with pytest.raises(ConfigError, match="must have at most 100 bytes"):
        RegisteredMemory(memoryview(bytearray(BLOCK_BYTES)))


@NEEDS_NIXL
def test_agents_leave_no_descriptors_behind() -> None:
    def run() -> int:
        rig = Rig("nixl")
        try:
            rig.pull(key(1), BLOCKS)
            assert rig.wait(key(1)).error == ""
        finally:
            rig.close()
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    run()
    assert run() == run()


class Distant:
    """A source in a process of its own, which is read over TCP, and a puller here. A proxy is between them.

    on_grant:  called before a grant is passed on
    begun:     gets an item when a read has begun
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp")  # else it is done at once, without the other process
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, LAYOUT, NUM_BLOCKS, ["nixl"]), daemon=True)
        self.process.start()
        theirs.close()
        source, self.checksums = self._pipe.recv()
        self.on_grant: Callable[[], None] = lambda: None
        self._proxy = Proxy(source.shards[0].data_address, self._pass_on)
        self.source: KVSource = with_shard(source, data_address=self._proxy.address)
        self.begun: SimpleQueue[None] = SimpleQueue()
        begin_read = NixlAgent.begin_read

        def begin_read_and_say_so(agent: NixlAgent, local: Sequence[Span], remote: Sequence[Span]) -> int:
            number = begin_read(agent, local, remote)
            self.begun.put(None)
            return number

        monkeypatch.setattr(NixlAgent, "begin_read", begin_read_and_say_so)
        self.received = memoryview(bytearray([UNTOUCHED]) * (NUM_BLOCKS * BLOCK_BYTES))
        self.events = Events()
        memory = ShardMemory(self.received, range(LAYOUT.num_kv_heads), LAYOUT.head_bytes)
        self.puller = KVPuller(PeerId("decode#1"), memory, LAYOUT, self.events.deliver, "nixl")

    def pull(self, pull: SequenceKey, block_ids: range = BLOCKS) -> None:
        """Each into the target of its number."""
        ids = tuple(map(BlockId, block_ids))
        self.apply(Publish(pull, ids))
        checksums = tuple(self.checksums[block_id] for block_id in ids)
        kv = KVDescriptor(source=self.source, num_tokens=16 * len(ids), block_ids=ids, checksums=checksums)
        copies = tuple(BlockCopy(*each) for each in zip(ids, ids, checksums, strict=True))
        self.puller.apply(StartPull(pull, kv, copies))

    def apply(self, effect: SenderEffect) -> None:
        """At the source; returns when it is done."""
        self._pipe.send(effect)
        self._pipe.recv()

    def error_of(self, pull: SequenceKey) -> str:
        self.events.wait_for(lambda: self.events.finished(pull))
        return self.events.finished(pull)[0].error

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def check_untouched(self) -> None:
        assert set(self.received[BLOCKS.start * BLOCK_BYTES : BLOCKS.stop * BLOCK_BYTES]) == {UNTOUCHED}

    def close(self) -> None:
        self.puller.close()
        self._proxy.close()
        self._pipe.close()
        self.process.kill()
        self.process.join()

    def _pass_on(self, answer: list[Envelope]) -> list[Envelope]:
        self.on_grant()
        return answer


@pytest.fixture
def distant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Distant]:
    distant = Distant(monkeypatch)
    yield distant
    distant.close()


def begin_read_of_a_stopped_source(distant: Distant) -> None:
    """Once connected: the source grants, and then does nothing any more."""
    distant.pull(key(0))
    assert distant.error_of(key(0)) == ""
    distant.received[:] = bytes([UNTOUCHED]) * len(distant.received)
    for _ in BLOCKS:
        distant.begun.get(timeout=DEADLINE_S)
    distant.on_grant = partial(distant.send_signal, signal.SIGSTOP)
    distant.pull(key(1))
    distant.begun.get(timeout=DEADLINE_S)
    distant.on_grant = lambda: None


@NEEDS_NIXL
def test_a_source_that_is_killed_while_it_is_read_ends_the_pull(distant: Distant) -> None:
    begin_read_of_a_stopped_source(distant)
    distant.send_signal(signal.SIGKILL)
    assert "prefill#1: NIXL: cannot read" in distant.error_of(key(1))
    distant.check_untouched()
    assert distant.puller.is_alive


@NEEDS_NIXL
def test_a_source_that_is_killed_before_it_is_read_ends_the_pull(distant: Distant) -> None:
    def kill() -> None:
        distant.send_signal(signal.SIGKILL)
        distant.process.join()

    distant.on_grant = kill
    distant.pull(key(1))
    assert "prefill#1: NIXL: cannot read" in distant.error_of(key(1))
    distant.check_untouched()
    assert distant.puller.is_alive


@NEEDS_NIXL
def test_an_aborted_pull_s_bytes_that_come_late_do_not_touch_its_targets(distant: Distant) -> None:
    begin_read_of_a_stopped_source(distant)
    distant.puller.apply(AbortPull(key(1)))
    assert distant.error_of(key(1)) == "aborted"
    distant.check_untouched()
    distant.send_signal(signal.SIGCONT)
    distant.pull(key(2), range(BLOCKS.stop, NUM_BLOCKS))  # which is read after the first one
    assert distant.error_of(key(2)) == ""
    distant.check_untouched()


@NEEDS_NIXL
def test_what_was_granted_can_be_read_when_it_is_withdrawn(distant: Distant) -> None:
    """As it can be from shared memory; the checksum says whether it is still the same."""
    distant.on_grant = lambda: distant.apply(Withdraw(key(1)))
    distant.pull(key(1))
    assert distant.error_of(key(1)) == ""


@NEEDS_NIXL
def test_closing_ends_a_read_that_is_under_way(distant: Distant) -> None:
    begin_read_of_a_stopped_source(distant)
    distant.puller.close()
    assert "thread ended" in distant.error_of(key(1))
    distant.send_signal(signal.SIGCONT)
    distant.process.join(0)
    distant.check_untouched()
