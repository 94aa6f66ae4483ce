"""Attention of one new token per sequence over its paged KV."""

import torch
from torch import Tensor

from kernels.online_softmax import OnlineSoftmax, read_kv_tile, sees
from kernels.paged_kv import LayerKV

# Keys a step reads for every sequence: bounds the copy out of the cache.
BLOCK_N = 512


def decode_attention(
    q: Tensor,
    kv: LayerKV,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One new token per sequence attends to that sequence's paged KV.

    q:             [num_seqs, num_heads, head_dim]
    block_tables:  [num_seqs, max_blocks] int32; entries past the last block are never read
    context_lens:  [num_seqs] int32, at least 1, the new token included
    window:        how many keys a token sees, its own among them; None: all
    softcap:       scores become softcap * tanh(score / softcap); None: they stay as they are
    Returns [num_seqs, num_heads, head_dim] in q's dtype; sums in fp32.
    """
    num_kv_heads, block_size = kv.num_kv_heads, kv.block_size
    num_keys = max(BLOCK_N // block_size, 1) * block_size
    # Longest first: the sequences that still have keys are always the first ones.
    lens, order = context_lens.sort(descending=True)
    lens_on_host = lens.tolist()
    tables = block_tables[order]
    attention = OnlineSoftmax(q[order].unflatten(1, (num_kv_heads, -1)), scale, softcap)
    for start in range(0, max(lens_on_host, default=0), num_keys):
        num_active = sum(length > start for length in lens_on_host)
        k, v, positions = read_kv_tile(kv, tables[:num_active], lens[:num_active], start, num_keys)
        attention.update(k, v, sees(lens[:num_active, None, None] - 1, positions, window))
    out = torch.empty_like(q)
    out[order] = attention.result().flatten(1, 2).to(q.dtype)
    return out
