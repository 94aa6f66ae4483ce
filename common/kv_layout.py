"""What a KV block is, in terms that two workers can compare before bytes flow between them."""

from dataclasses import dataclass, fields

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of one block: `[num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]`, contiguous.

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
    def block_bytes(self) -> int:
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    def mismatches(self, other: "KVLayout") -> list[str]:
        """Each field that differs, as `field: ours != theirs`; empty when blocks are interchangeable."""
        pairs = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return [f"{name}: {ours!r} != {theirs!r}" for name, ours, theirs in pairs if ours != theirs]
