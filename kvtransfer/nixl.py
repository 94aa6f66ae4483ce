"""KV blocks through NIXL and its UCX backend: over RDMA where both hosts have it, else over whatever UCX finds.

A source registers its cache, and a receiver reads granted blocks out of it. A read cannot be called back: NIXL releases
one that is under way, and its bytes arrive all the same (1.5.1 over TCP, a source that was stopped and went on). So
blocks are read into memory beside the cache, and copied into their targets from there; and each source is read by an
agent of its own, after whose end nothing arrives.

UCX believes what it is told about an agent: a made-up description can end the process that loads it. And who has a
description can read all of the cache, granted or not. This is for hosts that trust each other.
"""

import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from common.errors import ConfigError, TransferError
from common.ids import BlockId
from common.kv_source import MAX_AGENT_BYTES, KVShard, KVSource
from common.wire import Buffer, KVBlocks
from kvtransfer.nixl_agent import NixlAgent, Span

DESCRIPTORS_PER_SOURCE = 20
"""Of an agent: 15 and those of its connection, on a host without RDMA (NIXL 1.5.1)."""
NUM_SLOTS = 4
"""Reads under way per source. 16 MiB between two looks at them, a millisecond later, are more than 100 Gbit/s."""


def check_nixl() -> None:
    """Before a model is loaded. Raises: ConfigError when NIXL is not installed, or does not work here."""
    RegisteredMemory(memoryview(mmap.mmap(-1, mmap.PAGESIZE))).close()


class RegisteredMemory:
    """A cache that agents of other processes can read. Belongs to one thread at a time.

    agent, address: what a `KVShard` says about it
    """

    def __init__(self, memory: memoryview) -> None:
        """Raises: ConfigError when it cannot be had."""
        try:
            self._agent = NixlAgent(memory)
            self.agent = self._agent.metadata()
        except TransferError as error:
            raise ConfigError(f"--kv-transport nixl: {error}") from error
        self.address = self._agent.address
        if len(self.agent) > MAX_AGENT_BYTES:
            self.close()
            raise ConfigError(
                f"--kv-transport nixl: the agent's description must have at most {MAX_AGENT_BYTES} bytes, got "
                f"{len(self.agent)}; UCX_NET_DEVICES or UCX_TLS makes it shorter"
            )

    def progress(self) -> None:
        """Do our part of what others read: to connect, and to send where there is no RDMA. Raises: TransferError."""
        self._agent.progress()

    def close(self) -> None:
        """Who reads it gets an error. Idempotent."""
        self._agent.close()


@dataclass(slots=True, eq=False)
class NixlRead:
    """Blocks that wait for a slot, or are on their way into it.

    spans:   where they are at the source
    Mutable: slot and number of the transfer, once it has begun; blocks, once they are here.
    """

    route: "NixlRoute"
    spans: Sequence[Span]
    slot: int = -1
    number: int = -1
    blocks: Sequence[Buffer] | None = None

    def advance(self) -> None:
        self.route.advance(self)

    def close(self) -> None:
        self.route.end(self)


class NixlRoute:
    """Reads blocks out of a source's cache, a few runs at a time. The source only says that they may be read.

    Takes 16 MiB of memory.
    """

    name = "nixl"
    with_data = False
    fetch_bytes = 4 * 2**20

    def __init__(self, source: KVSource, shard: KVShard) -> None:
        """Blocks for 50 ms. Raises: TransferError when the shard has no agent, or it cannot be used; ConfigError."""
        if not shard.nixl_agent:
            raise TransferError(f"{shard.peer} has no NIXL agent: it does not run with --kv-transport nixl")
        self._shard = shard
        self._head_bytes = source.layout.head_bytes
        self._block_bytes = shard.num_heads * self._head_bytes
        self._slot_bytes = max(self.fetch_bytes, self._block_bytes)
        self._memory = memoryview(mmap.mmap(-1, NUM_SLOTS * self._slot_bytes))
        try:
            self._agent = NixlAgent(self._memory)
            self._agent.connect(shard.nixl_agent)
        except TransferError as error:
            raise TransferError(f"{shard.peer}: {error}") from error
        self._free_slots = list(range(NUM_SLOTS))
        self._waiting: deque[NixlRead] = deque()
        self._failure = ""

    def read(self, message: KVBlocks, buffers: Sequence[Buffer], heads: range) -> NixlRead:
        """The run has the bytes of one fetch at most."""
        if buffers:
            raise TransferError(f"a grant comes without data, got {len(buffers)} frames")
        read = NixlRead(self, [self._span(block_id, heads) for block_id in message.block_ids])
        self._waiting.append(read)
        self._begin_waiting()
        return read

    def advance(self, read: NixlRead) -> None:
        if read.number >= 0 and read.blocks is None and not self._failure:
            with self._noting_failure():
                self._look_at(read)
        if self._failure:
            raise TransferError(self._failure)

    def end(self, read: NixlRead) -> None:
        """Its slot is the next one's."""
        self._agent.end(read.number)
        self._free_slots.append(read.slot)
        self._begin_waiting()

    def close(self) -> None:
        self._agent.close()

    def _begin_waiting(self) -> None:
        while self._waiting and self._free_slots and not self._failure:
            read = self._waiting.popleft()
            read.slot = self._free_slots.pop()
            local = [(self._agent.address + start, size) for start, size in self._places(read)]
            with self._noting_failure():
                read.number = self._agent.begin_read(local, read.spans)
                self._look_at(read)  # within a host it is done by now

    def _look_at(self, read: NixlRead) -> None:
        if self._agent.is_done(read.number):
            read.blocks = [self._memory[start : start + size] for start, size in self._places(read)]

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """What fails is of no use any more, which is said when somebody asks for a read."""
        try:
            yield
        except TransferError as error:
            self._failure = f"{self._shard.peer}: {error}"

    def _span(self, block_id: BlockId, heads: range) -> Span:
        """These heads of a block, at the source."""
        start = block_id * self._block_bytes + (heads.start - self._shard.first_head) * self._head_bytes
        return self._shard.nixl_address + start, len(heads) * self._head_bytes

    def _places(self, read: NixlRead) -> list[Span]:
        """In our memory, from its beginning: all blocks of a read are of the same size."""
        _, size = read.spans[0]
        return [(read.slot * self._slot_bytes + index * size, size) for index in range(len(read.spans))]
