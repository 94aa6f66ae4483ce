"""A sender and a receiver of KV blocks, with a proxy in the data channel that tests can make lie."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import zmq

from common.ids import BlockId, PeerId, RequestId, SequenceKey
from common.kv_layout import HeadChecksums, KVLayout, head_checksums
from common.kv_source import KVDescriptor, KVSource
from common.link_socket import Wakeup
from common.shard_memory import ShardMemory
from common.wire import Buffer, Envelope, KVBlocks, decode, encode
from kvtransfer.nixl import NixlRoute, RegisteredMemory
from kvtransfer.nixl_agent import PACKAGE
from kvtransfer.puller import KVPuller
from kvtransfer.route import Mode
from kvtransfer.server import KVServer
from kvtransfer.shm import SharedSegment, ShmRoute
from kvtransfer.tcp import TcpRoute
from kvtransfer.transport import (
    BlockCopy,
    KVReleased,
    Publish,
    PullFinished,
    SendRelease,
    StartPull,
    TransferEvent,
)

DEADLINE_S = 10.0
NEEDS_NIXL = pytest.mark.skipif(find_spec(PACKAGE) is None, reason="needs the extra `nixl`")
MODES = ["tcp", "shm", pytest.param("nixl", marks=NEEDS_NIXL)]
"""Those in which a block can travel by one way only."""
LAYOUT = KVLayout(
    name="test", dtype="float32", num_layers=1, num_kv_heads=2, head_dim=4, block_size=16, model_hash="test-model"
)
BLOCK_BYTES = LAYOUT.block_bytes
NUM_BLOCKS = 64
UNTOUCHED = 0xEE

Rewrite = Callable[[list[Envelope]], list[Envelope]]


def set_fetch_bytes(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Of every route: with small ones a pull takes many."""
    for route in (TcpRoute, ShmRoute, NixlRoute):
        monkeypatch.setattr(route, "fetch_bytes", num_bytes)


def key(number: int, attempt: int = 0) -> SequenceKey:
    return SequenceKey(RequestId(f"r{number}"), attempt)


class Events:
    """Transfer events, kept in order, for tests to wait on."""

    def __init__(self) -> None:
        self.all: list[TransferEvent] = []
        self.changed = threading.Condition()

    def deliver(self, event: TransferEvent) -> None:
        with self.changed:
            self.all.append(event)
            self.changed.notify_all()

    def finished(self, wanted: SequenceKey) -> list[PullFinished]:
        return [event for event in self.all if isinstance(event, PullFinished) and event.key == wanted]

    def num_released(self, wanted: SequenceKey) -> int:
        return self.all.count(KVReleased(wanted))

    def wait_for(self, found: Callable[[], Any]) -> None:
        with self.changed:
            assert self.changed.wait_for(found, DEADLINE_S), f"not within {DEADLINE_S} s; events: {self.all[-10:]}"


class Rig:
    """One `KVServer` and one `KVPuller` in this process, each with a cache of NUM_BLOCKS.

    mode: "shm" puts the sender's cache into shared memory, "nixl" registers it. source: as receivers are told; goes
    through the proxy once there is one.
    """

    def __init__(self, mode: Mode, pull_timeout_s: float = DEADLINE_S, idle_s: float = 60.0) -> None:
        self.mode: Mode = mode
        self.events = Events()
        num_bytes = NUM_BLOCKS * BLOCK_BYTES
        self.segment = SharedSegment(num_bytes).create() if mode == "shm" else None
        self.sent = self.segment.memory if self.segment else memoryview(bytearray(num_bytes))
        self.sent[:] = random.Random(0).randbytes(num_bytes)
        self.registered = RegisteredMemory(self.sent) if mode == "nixl" else None
        self.received = memoryview(bytearray([UNTOUCHED]) * num_bytes)
        heads = range(LAYOUT.num_kv_heads)
        sent, received = (ShardMemory(memory, heads, LAYOUT.head_bytes) for memory in (self.sent, self.received))
        self.server = KVServer(
            *(PeerId("prefill#1"), sent, self.events.deliver, "ipc://*"),
            segment=self.segment,
            registered=self.registered,
        )
        self.puller = KVPuller(
            *(PeerId("decode#1"), received, LAYOUT, self.events.deliver),
            *(mode, pull_timeout_s, idle_s),
        )
        self.source = KVSource(
            peer=PeerId("prefill#1"), layout=LAYOUT, num_blocks=NUM_BLOCKS, shards=(self.server.shard,)
        )
        self._direct = self.source
        self.proxy: Proxy | None = None
        self._checksums = [self.checksums(BlockId(block_id)) for block_id in range(NUM_BLOCKS)]

    @property
    def is_read(self) -> bool:
        """Whether the receiver reads the sender's cache, and the sender only says that it may."""
        return self.mode != "tcp"

    def checksums(self, block_id: BlockId) -> HeadChecksums:
        return head_checksums(block(self.sent, block_id), LAYOUT.head_bytes)

    def lie(self, rewrite: Rewrite) -> "Proxy":
        """Let every answer of the server go through `rewrite`, cut into runs of one block each."""
        self.proxy = Proxy(self.source.shards[0].data_address, rewrite)
        self.source = with_shard(self.source, data_address=self.proxy.address)
        return self.proxy

    def start(self, pull: SequenceKey, block_ids: Sequence[int], source: KVSource | None = None) -> StartPull:
        """A pull of these blocks, the last one into the first target, published at the server."""
        ids = tuple(BlockId(block_id) for block_id in block_ids)
        self.server.apply(Publish(pull, ids))
        checksums = tuple(self._checksums[block_id] for block_id in ids)
        descriptor = KVDescriptor(
            source=source or self.source, num_tokens=len(ids) * 16, block_ids=ids, checksums=checksums
        )
        targets = reversed(ids)
        copies = tuple(BlockCopy(*each) for each in zip(ids, targets, checksums, strict=True))
        return StartPull(pull, descriptor, copies)

    def pull(self, pull: SequenceKey, block_ids: Sequence[int], source: KVSource | None = None) -> StartPull:
        start = self.start(pull, block_ids, source)
        self.puller.apply(start)
        return start

    def wait(self, pull: SequenceKey) -> PullFinished:
        self.events.wait_for(lambda: self.events.finished(pull))
        (finished,) = self.events.finished(pull)
        return finished

    def check_arrived(self, start: StartPull) -> None:
        """Every target holds its source's bytes, and nothing else was written."""
        for copy in start.copies:
            assert block(self.received, copy.target) == block(self.sent, copy.source), f"{copy} did not arrive"
        self.check_untouched([copy.target for copy in start.copies])

    def check_untouched(self, except_block_ids: Sequence[BlockId] = ()) -> None:
        for block_id in set(range(NUM_BLOCKS)) - set(except_block_ids):
            assert set(block(self.received, BlockId(block_id))) == {UNTOUCHED}, f"block {block_id} was written"

    def counter(self, name: str) -> float:
        return self.puller.counters()[name]

    def wait_counter(self, name: str, least: float) -> None:
        self.wait_until(lambda: self.counter(name) >= least)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for what counters say, by sending releases round: each makes the transfer thread take a turn."""
        seen = 0
        while not is_so():
            marker = key(1_000_000 + seen)
            self.server.apply(Publish(marker, ()))
            self.puller.apply(SendRelease(marker, self._direct))
            self.events.wait_for(lambda marker=marker: self.events.num_released(marker))
            seen += 1
            assert seen < 10_000, f"it stays at {self.puller.counters()}"

    def close(self) -> None:
        self.puller.close()
        if self.proxy:
            self.proxy.close()
        self.server.close()
        for memory in (self.segment, self.registered):
            if memory:
                memory.close()


def with_shard(source: KVSource, **fields: Any) -> KVSource:
    """The same source with fields of its first shard changed."""
    first, *others = source.shards
    return replace(source, shards=(replace(first, **fields), *others))


def block(memory: memoryview, block_id: BlockId) -> memoryview:
    return memory[block_id * BLOCK_BYTES : (block_id + 1) * BLOCK_BYTES]


class Proxy:
    """Stands between one receiver and a server, on its own thread, and rewrites answers."""

    def __init__(self, target: str, rewrite: Rewrite) -> None:
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.bind("ipc://*")
        self.address = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._back = self._context.socket(zmq.DEALER)
        self._back.connect(target)
        self._rewrite = rewrite
        self._wakeup = Wakeup()
        self._held: list[Envelope] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send_later(self, envelopes: list[Envelope]) -> None:
        """Send answers from any thread."""
        self._held += envelopes
        self._wakeup.set()

    def close(self) -> None:
        self._is_closing = True
        self._wakeup.set()
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        for end in (self._front, self._back, self._wakeup.fileno):
            poller.register(end, zmq.POLLIN)
        receiver = b""
        while not self._is_closing:
            ready = dict(poller.poll())
            if self._front in ready:
                receiver, *frames = self._front.recv_multipart()
                self._back.send_multipart(frames)
            if self._back in ready:
                self._answer(receiver, self._rewrite(single_runs(decode(self._back.recv_multipart()))))
            if self._wakeup.fileno in ready:
                self._wakeup.clear()
                self._answer(receiver, self._held)
                self._held = []
        self._context.destroy(linger=0)
        self._wakeup.close()

    def _answer(self, receiver: bytes, envelopes: list[Envelope]) -> None:
        for envelope in envelopes:
            self._front.send_multipart([receiver, *encode(envelope)])


def blocks_of(envelope: Envelope) -> KVBlocks:
    assert isinstance(envelope.message, KVBlocks)
    return envelope.message


def single_runs(envelope: Envelope) -> list[Envelope]:
    """The same answer, one block a run."""
    message = blocks_of(envelope)
    if message.refusal:
        return [envelope]
    return [
        replace(
            envelope,
            message=replace(message, first=message.first + index, block_ids=(block_id,)),
            buffers=envelope.buffers[index : index + 1],
        )
        for index, block_id in enumerate(message.block_ids)
    ]


def change(envelope: Envelope, **fields: Any) -> Envelope:
    """The same envelope with fields of its message changed."""
    return replace(envelope, message=replace(blocks_of(envelope), **fields))


def with_buffers(envelope: Envelope, buffers: Sequence[Buffer]) -> Envelope:
    return replace(envelope, buffers=buffers)
