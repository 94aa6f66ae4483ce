"""What a KV block is, in terms that two workers can compare before bytes flow between them."""

from dataclasses import dataclass, fields, replace
from typing import Self

import xxhash

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
HeadChecksums = tuple[int, ...]
"""xxh3_64 of each KV head's bytes of a block, in the order of heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of one block: `[num_kv_heads, num_layers, 2 (K, V), block_size, head_dim]`, contiguous.

    So any range of heads is one contiguous piece of a block: what another split of the heads takes from it.

    name:        order of the innermost `[block_size, head_dim]`; a device family may have its own
    model_hash:  identity of config and weights; blocks of two models are never interchangeable
    """

    name: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    model_hash: str

    @property
    def head_bytes(self) -> int:
        """One head's keys and values of a block, in all layers."""
        return self.num_layers * 2 * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    def of_heads(self, num_heads: int) -> Self:
        """Of a cache that has only so many heads of each block."""
        return replace(self, num_kv_heads=num_heads)

    def mismatches(self, other: "KVLayout") -> list[str]:
        """Each field that differs, as `field: ours != theirs`; empty when blocks are interchangeable."""
        pairs = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return [f"{name}: {ours!r} != {theirs!r}" for name, ours, theirs in pairs if ours != theirs]


def head_checksums(heads: memoryview, head_bytes: int) -> HeadChecksums:
    """heads: the bytes of some heads of a block, side by side."""
    starts = range(0, len(heads), head_bytes)
    return tuple(xxhash.xxh3_64_intdigest(heads[start : start + head_bytes]) for start in starts)
