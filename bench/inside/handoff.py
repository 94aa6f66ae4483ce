"""How fast KV blocks go from one process of this host to another, through the very server and puller of the workers.

A handoff is timed from `StartPull` to `PullFinished`: asked for, copied into the reserved blocks, and every checksum
compared there. Both ends' memory was touched before; blocks are taken from all over the caches, in another order each
time, so that no small cache of a core holds them.
"""

import mmap
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from statistics import median
from typing import get_args

from bench.inside.handoff_source import HandoffSource
from common.errors import TransferError
from common.ids import BlockId, PeerId, RequestId, SequenceKey
from common.kv_layout import KVLayout, head_checksums
from common.kv_source import KVDescriptor
from common.shard_memory import ShardMemory
from kvtransfer.puller import KVPuller
from kvtransfer.route import Mode
from kvtransfer.transport import BlockCopy, PullFinished, SendRelease, StartPull

_PROBE_BYTES = 256 * 2**20
_PROBE_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Handoffs:
    """Handoffs of prompts of one length over one transport.

    times_s:  one each, in order
    """

    transport: str
    num_tokens: int
    num_bytes: int
    times_s: Sequence[float]

    @property
    def median_s(self) -> float:
        return median(self.times_s)

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.median_s


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """limit_bytes_per_s:  of one core that does nothing but copy a block, and then check the copy
    connect_s:  the first handoff, of one block, by transport: with the connection and the mapping of memory
    """

    layout: KVLayout
    limit_bytes_per_s: float
    connect_s: dict[str, float]
    handoffs: Sequence[Handoffs]


def measure_handoffs(
    layout: KVLayout, transports: Sequence[str], lens: Sequence[int], repeats: int, tick: Callable[[], None]
) -> HandoffReport:
    """tick: called after each handoff.

    Raises: TransferError; ConfigError when there is not so much shared memory, or no NIXL.
    """
    num_blocks = [-(-num_tokens // layout.block_size) for num_tokens in lens]
    cache_blocks = max(2, *num_blocks)
    memory = _touched_memory(cache_blocks * layout.block_bytes)
    handoffs: list[Handoffs] = []
    connect_s: dict[str, float] = {}
    with HandoffSource(layout, cache_blocks, transports) as source:
        for transport in transports:
            receiver = _Receiver(source, memory, layout, transport)
            try:
                connect_s[transport] = receiver.hand_over(1)
                for num_tokens, num in zip(lens, num_blocks, strict=True):
                    times_s: list[float] = []
                    for _ in range(repeats):
                        times_s.append(receiver.hand_over(num))
                        tick()
                    handoffs.append(Handoffs(transport, num_tokens, num * layout.block_bytes, times_s))
            finally:
                receiver.close()
    return HandoffReport(layout, _limit_bytes_per_s(layout), connect_s, handoffs)


class _Receiver:
    """The decode side, and what it asks for. Mutable: the number of handoffs so far."""

    def __init__(self, source: HandoffSource, memory: memoryview, layout: KVLayout, transport: str) -> None:
        modes: dict[str, Mode] = {mode: mode for mode in get_args(Mode)}
        self._source = source
        self._transport = transport
        self._finished: SimpleQueue[tuple[float, PullFinished]] = SimpleQueue()
        shard = ShardMemory(memory, range(layout.num_kv_heads), layout.head_bytes)
        self._puller = KVPuller(PeerId("decode#1"), shard, layout, self._on_finished, modes[transport])
        self._block_ids = [BlockId(index) for index in range(len(memory) // layout.block_bytes)]
        self._random = random.Random(0)
        self._num = 0

    def hand_over(self, num_blocks: int) -> float:
        """Pull so many blocks and release them; returns how long the pull took. Raises: TransferError."""
        self._num += 1
        key = SequenceKey(RequestId(f"{self._transport} {self._num}"), 0)
        start = self._start_pull(key, num_blocks)
        self._source.publish(key, start.kv.block_ids)
        started_s = time.perf_counter()
        self._puller.apply(start)
        ended_s, finished = self._finished.get()
        if finished.error:
            raise TransferError(f"{self._transport}: {finished.error}")
        self._puller.apply(SendRelease(key, self._source.source))
        return ended_s - started_s

    def close(self) -> None:
        self._puller.close()

    def _start_pull(self, key: SequenceKey, num_blocks: int) -> StartPull:
        block_ids = tuple(self._random.sample(self._block_ids, num_blocks))
        checksums = tuple(self._source.checksums[block_id] for block_id in block_ids)
        descriptor = KVDescriptor(
            source=self._source.source,
            num_tokens=num_blocks * self._source.source.layout.block_size,
            block_ids=block_ids,
            checksums=checksums,
        )
        targets = self._random.sample(self._block_ids, num_blocks)
        copies = (BlockCopy(*each) for each in zip(block_ids, targets, checksums, strict=True))
        return StartPull(key, descriptor, tuple(copies))

    def _on_finished(self, event: PullFinished) -> None:
        self._finished.put((time.perf_counter(), event))


def _touched_memory(num_bytes: int) -> memoryview:
    """As a cache is allocated, and written once: pages that nobody wrote yet are no memory."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    view[:: mmap.PAGESIZE] = bytes(len(view[:: mmap.PAGESIZE]))
    return view


def _limit_bytes_per_s(layout: KVLayout) -> float:
    """Over more memory than fits a core's own caches. A copied byte counts once."""
    block_bytes = layout.block_bytes
    size = max(block_bytes, _PROBE_BYTES // block_bytes * block_bytes)
    source, target = _touched_memory(size), _touched_memory(size)
    times_s: list[float] = []
    for _ in range(_PROBE_REPEATS):
        started_s = time.perf_counter()
        for start in range(0, size, block_bytes):
            target[start : start + block_bytes] = source[start : start + block_bytes]
            head_checksums(target[start : start + block_bytes], layout.head_bytes)
        times_s.append(time.perf_counter() - started_s)
    return size / median(times_s)
