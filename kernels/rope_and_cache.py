"""Rotary position embedding, and the write of new keys and values into the paged cache."""

import torch
from torch import Tensor

from kernels.paged_kv import LayerKV


def rope_and_cache(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, kv: LayerKV, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by their positions; put the rotated k and v into their slots.

    q:             [num_tokens, num_heads, head_dim]
    k, v:          [num_tokens, num_kv_heads, head_dim]
    cos_sin:       [max_positions, head_dim] fp32: cosines of the head_dim / 2 frequencies, then their sines
    positions:     [num_tokens] int64
    slot_mapping:  [num_tokens] int64; slot = block_id * block_size + offset; each slot at most once
    Returns (q, k) rotated, new tensors in their dtypes; the products are fp32.
    Dimension i turns with i + head_dim / 2 (transformers' rotate_half). Source: RoFormer (2021).
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    kv.write(k, v, slot_mapping)
    return q, k


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
