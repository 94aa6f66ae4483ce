"""How keys and values lie in a block, on every device."""

from dataclasses import dataclass

import torch
from torch import Tensor


def values_per_word(dtype: torch.dtype) -> int:
    """A 32-bit word holds one fp32 value, or two of 16 bits: what a CPU multiplies in one lane."""
    return max(1, 4 // dtype.itemsize)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's view of the paged cache; any strides over blocks and heads.

    keys:    [num_blocks, num_kv_heads, head_dim / pair, block_size, pair]
    values:  [num_blocks, num_kv_heads, block_size / pair, head_dim, pair]
    pair:    `values_per_word` of the dtype

    A row of keys is one pair of dimensions of all tokens, a row of values one pair of tokens in all dimensions, so both
    products of attention meet words that lie side by side, and no sum crosses lanes.
    """

    keys: Tensor
    values: Tensor

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[3]

    @property
    def head_dim(self) -> int:
        return self.values.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    def write(self, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """k, v: [num_tokens, num_kv_heads, head_dim];  slot_mapping: [num_tokens], each slot at most once."""
        pair = self.keys.shape[4]
        block_ids, offsets = slot_mapping // self.block_size, slot_mapping % self.block_size
        self.keys[block_ids, :, :, offsets] = k.to(self.dtype).unflatten(2, (-1, pair))
        self.values[block_ids, :, offsets // pair, :, offsets % pair] = v.to(self.dtype)

    def read(self, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Copy whole blocks out.

        block_ids: [num_seqs, num_blocks] int64
        Returns k and v, [num_seqs, num_kv_heads, num_blocks * block_size, head_dim] in the cache's dtype.
        """
        # Indices of [num_seqs, num_kv_heads, num_blocks] bring blocks in the order wanted with one copy.
        heads = torch.arange(self.num_kv_heads, device=self.keys.device).unsqueeze(1)
        k, v = (part[block_ids.unsqueeze(1), heads] for part in (self.keys, self.values))
        return k.transpose(3, 4).flatten(4, 5).flatten(2, 3), v.transpose(4, 5).flatten(2, 4)
