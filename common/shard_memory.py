"""A rank's part of a KV cache as the transfer sees it, wherever it lies. Free of torch and zmq."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.ids import BlockId


class Arrivals(Protocol):
    """Room for pieces of blocks on their way into the cache. Belongs to one thread.

    pieces: a writable one for each block, of len(heads) * head_bytes
    """

    @property
    def pieces(self) -> Sequence[memoryview]: ...

    def keep(self, positions: Sequence[int]) -> None:
        """These pieces are as they should be: returns when they are in their blocks."""
        ...


class BlockMemory(Protocol):
    """The blocks of a cache that has some of the model's KV heads. Any thread.

    heads: of the model, at least one
    """

    @property
    def heads(self) -> range: ...

    @property
    def head_bytes(self) -> int: ...

    def read(self, block_ids: Sequence[BlockId], heads: range) -> Sequence[memoryview]:
        """The bytes of these heads, which are side by side, of each block."""
        ...

    def arrivals(self, block_ids: Sequence[BlockId], heads: range) -> Arrivals:
        """For these heads of blocks that nobody else writes."""
        ...


@dataclass(frozen=True, slots=True)
class InPlace:
    """Pieces that are parts of the cache: what has arrived is there."""

    pieces: Sequence[memoryview]

    def keep(self, positions: Sequence[int]) -> None:
        """They are where they should be."""


@dataclass(frozen=True, slots=True)
class ShardMemory:
    """A cache in this host's memory.

    memory:  [num_blocks, len(heads), head_bytes]
    """

    memory: memoryview
    heads: range
    head_bytes: int

    def __post_init__(self) -> None:
        assert self.memory.nbytes % self.block_bytes == 0, f"{self.memory.nbytes} bytes of {self.block_bytes} a block"

    @property
    def block_bytes(self) -> int:
        return len(self.heads) * self.head_bytes

    @property
    def num_blocks(self) -> int:
        return self.memory.nbytes // self.block_bytes

    def piece(self, block_id: int, heads: range) -> memoryview:
        """These heads of a block. Shorter where the memory has not got them."""
        start = block_id * self.block_bytes + (heads.start - self.heads.start) * self.head_bytes
        return self.memory[start : start + len(heads) * self.head_bytes]

    def read(self, block_ids: Sequence[BlockId], heads: range) -> list[memoryview]:
        """Views: nothing is copied."""
        return [self.piece(block_id, heads) for block_id in block_ids]

    def arrivals(self, block_ids: Sequence[BlockId], heads: range) -> InPlace:
        return InPlace(self.read(block_ids, heads))
