"""A rank's part of a KV cache as bytes. Free of torch and zmq."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardMemory:
    """The blocks of a cache that has some of the model's KV heads.

    memory:  [num_blocks, len(heads), head_bytes]
    heads:   of the model, at least one
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
        """These heads of a block, which are side by side. Shorter where the memory has not got them."""
        start = block_id * self.block_bytes + (heads.start - self.heads.start) * self.head_bytes
        return self.memory[start : start + len(heads) * self.head_bytes]
