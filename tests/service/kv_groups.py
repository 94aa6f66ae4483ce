"""Two worker groups of any number of ranks each, with a real server or puller for every rank, in this process."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from common.ids import BlockId, PeerId, SequenceKey
from common.kv_layout import KVLayout, head_checksums
from common.kv_source import KVDescriptor, KVSource
from common.shard_memory import ShardMemory
from kvtransfer.nixl import RegisteredMemory
from kvtransfer.puller import KVPuller
from kvtransfer.route import Mode
from kvtransfer.server import KVServer
from kvtransfer.shm import SharedSegment
from kvtransfer.transport import BlockCopy, Publish, PullFinished, SendRelease, StartPull
from tests.service.kv_rig import DEADLINE_S, UNTOUCHED, Events, Proxy, Rewrite, key

NUM_BLOCKS = 24


def layout_of(num_heads: int) -> KVLayout:
    return KVLayout(
        name="test",
        dtype="float32",
        num_layers=2,
        num_kv_heads=num_heads,
        head_dim=4,
        block_size=16,
        model_hash="test-model",
    )


HEAD_BYTES = layout_of(1).head_bytes


class Sender:
    """One rank that serves. Of a head that a rank before it has it holds other bytes, which nobody must get."""

    def __init__(self, rank: int, heads: range, whole: ShardMemory, taken: set[int], mode: Mode) -> None:
        num_bytes = NUM_BLOCKS * len(heads) * HEAD_BYTES
        self.segment = SharedSegment(num_bytes).create() if mode == "shm" else None
        memory = self.segment.memory if self.segment else memoryview(bytearray(num_bytes))
        self.memory = ShardMemory(memory, heads, HEAD_BYTES)
        for block_id in range(NUM_BLOCKS):
            for head in heads:
                if head not in taken:
                    one = range(head, head + 1)
                    self.memory.piece(block_id, one)[:] = whole.piece(block_id, one)
        self.registered = RegisteredMemory(memory) if mode == "nixl" else None
        self.events = Events()
        self.server = KVServer(
            *(PeerId(f"prefill#1/{rank}"), self.memory, self.events.deliver, "ipc://*"),
            segment=self.segment,
            registered=self.registered,
        )

    def close(self) -> None:
        self.server.close()
        for memory in (self.segment, self.registered):
            if memory:
                memory.close()


class Receiver:
    """One rank that pulls."""

    def __init__(self, rank: int, heads: range, layout: KVLayout, mode: Mode, pull_timeout_s: float) -> None:
        memory = memoryview(bytearray([UNTOUCHED]) * (NUM_BLOCKS * len(heads) * HEAD_BYTES))
        self.memory = ShardMemory(memory, heads, HEAD_BYTES)
        self.events = Events()
        self.puller = KVPuller(
            *(PeerId(f"decode#1/{rank}"), self.memory, layout, self.events.deliver, mode, pull_timeout_s)
        )

    def wait(self, pull: SequenceKey) -> PullFinished:
        self.events.wait_for(lambda: self.events.finished(pull))
        (finished,) = self.events.finished(pull)
        return finished

    def counter(self, name: str) -> float:
        return self.puller.counters()[name]

    def check_untouched(self, except_block_ids: Sequence[BlockId] = ()) -> None:
        for block_id in set(range(NUM_BLOCKS)) - set(except_block_ids):
            assert set(self.memory.piece(block_id, self.memory.heads)) == {UNTOUCHED}, f"block {block_id} was written"


class Groups:
    """senders, receivers: the heads of each rank. source: as receivers are told, with proxies where there are some."""

    def __init__(
        self, senders: Sequence[range], receivers: Sequence[range], mode: Mode, pull_timeout_s: float = DEADLINE_S
    ) -> None:
        self.layout = layout_of(max(heads.stop for heads in senders))
        data = random.Random(0).randbytes(NUM_BLOCKS * self.layout.block_bytes)
        self.whole = ShardMemory(memoryview(data), range(self.layout.num_kv_heads), HEAD_BYTES)
        taken: set[int] = set()
        self.senders: list[Sender] = []
        for rank, heads in enumerate(senders):
            self.senders.append(Sender(rank, heads, self.whole, taken, mode))
            taken |= set(heads)
        self.receivers = [
            Receiver(rank, heads, self.layout, mode, pull_timeout_s) for rank, heads in enumerate(receivers)
        ]
        shards = tuple(sender.server.shard for sender in self.senders)
        self.source = KVSource(peer=PeerId("prefill#1"), layout=self.layout, num_blocks=NUM_BLOCKS, shards=shards)
        self._direct = self.source
        self._proxies: list[Proxy] = []

    def lie(self, rank: int, rewrite: Rewrite) -> Proxy:
        """Let every answer of a sender go through `rewrite`, cut into runs of one block each."""
        shards = list(self.source.shards)
        proxy = Proxy(shards[rank].data_address, rewrite)
        shards[rank] = replace(shards[rank], data_address=proxy.address)
        self.source = replace(self.source, shards=tuple(shards))
        self._proxies.append(proxy)
        return proxy

    def start(self, pull: SequenceKey, block_ids: Sequence[int]) -> StartPull:
        """A pull of these blocks, the last one into the first target, published at each rank."""
        ids = tuple(map(BlockId, block_ids))
        for sender in self.senders:
            sender.server.apply(Publish(pull, ids))
        heads = self.whole.heads
        checksums = tuple(head_checksums(self.whole.piece(block_id, heads), HEAD_BYTES) for block_id in ids)
        kv = KVDescriptor(source=self.source, num_tokens=16 * len(ids), block_ids=ids, checksums=checksums)
        copies = tuple(BlockCopy(*each) for each in zip(ids, reversed(ids), checksums, strict=True))
        return StartPull(pull, kv, copies)

    def pull(self, pull: SequenceKey, block_ids: Sequence[int]) -> StartPull:
        start = self.start(pull, block_ids)
        for receiver in self.receivers:
            receiver.puller.apply(start)
        return start

    def check_arrived(self, start: StartPull) -> None:
        """Each rank has its heads of every block where they belong, and nothing else was written."""
        for receiver in self.receivers:
            heads = receiver.memory.heads
            for copy in start.copies:
                got, wanted = receiver.memory.piece(copy.target, heads), self.whole.piece(copy.source, heads)
                assert got == wanted, f"heads {heads} of {copy.source} did not arrive"
            receiver.check_untouched([copy.target for copy in start.copies])

    def turn_until(self, receiver: Receiver, is_done: Callable[[], bool]) -> None:
        """Send releases round until something is so: each makes the transfer thread take a turn."""
        first = self.senders[0]
        for number in range(10_000):
            if is_done():
                return
            marker = key(1_000_000 + number)
            first.server.apply(Publish(marker, ()))
            receiver.puller.apply(SendRelease(marker, self._direct))
            first.events.wait_for(lambda marker=marker: first.events.num_released(marker))
        raise AssertionError(f"not in 10,000 turns; counters: {receiver.puller.counters()}")

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.puller.close()
        for proxy in self._proxies:
            proxy.close()
        for sender in self.senders:
            sender.close()
