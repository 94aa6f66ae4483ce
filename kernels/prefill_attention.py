"""Attention of ragged runs of new tokens over their paged KV: FlashAttention-2's schedule."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.online_softmax import OnlineSoftmax, read_kv_tile, sees
from kernels.paged_kv import LayerKV

# Rows and keys of a tile of scores. 64 x 128 to 128 x 256 are within a tenth of each other (2,048 tokens, 9 heads,
# two EPYC cores, 2026-12); fewer rows read the cache more often, more rows pad short sequences further.
BLOCK_M = 64
BLOCK_N = 256


class QueryTiles(NamedTuple):
    """Queries of all sequences, cut into tiles of one sequence each; those that see most keys come first.

    rows:       [num_tiles, num_rows] int64, index of the token; a short tile repeats its last row
    positions:  [num_tiles, num_rows] int64, position of the token in its sequence
    sequences:  [num_tiles] int64
    kv_lens:    keys that the last row of each tile may see, on the host
    """

    rows: Tensor
    positions: Tensor
    sequences: Tensor
    kv_lens: list[int]


def prefill_attention(
    q: Tensor,
    kv: LayerKV,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    max_seqlen_q: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of a ragged batch; keys and values, the new ones too, are read from the cache.

    q:             [num_tokens, num_heads, head_dim], sequences one after the other
    cu_seqlens_q:  [num_seqs + 1] int32; sequence i has the queries cu_seqlens_q[i] … cu_seqlens_q[i + 1] - 1,
                   at least one, which are the last tokens of its context
    context_lens:  [num_seqs] int32, prefix and new tokens
    block_tables:  [num_seqs, max_blocks] int32; entries past the last block are never read
    max_seqlen_q:  the most queries that a sequence has
    window:        how many keys a token sees, its own among them; None: all
    softcap:       scores become softcap * tanh(score / softcap); None: they stay as they are
    Returns [num_tokens, num_heads, head_dim] in q's dtype; sums in fp32.
    """
    num_kv_heads, block_size = kv.num_kv_heads, kv.block_size
    num_keys = max(BLOCK_N // block_size, 1) * block_size
    num_rows = min(BLOCK_M, max_seqlen_q)
    tiles = cut_query_tiles(cu_seqlens_q, context_lens, num_rows)
    tables, lens = block_tables[tiles.sequences], context_lens[tiles.sequences]
    # [tile, row, kv_head, group, head_dim] -> [tile, kv_head, row * group, head_dim]: a group shares its keys.
    q_tiles = q[tiles.rows].unflatten(2, (num_kv_heads, -1)).transpose(1, 2).flatten(2, 3)
    positions_q = tiles.positions.repeat_interleave(q.shape[1] // num_kv_heads, dim=1)
    attention = OnlineSoftmax(q_tiles, scale, softcap)
    for start in range(0, max(tiles.kv_lens, default=0), num_keys):
        active = slice(sum(length > start for length in tiles.kv_lens))
        k, v, positions = read_kv_tile(kv, tables[active], lens[active], start, num_keys)
        attention.update(k, v, sees(positions_q[active].unsqueeze(2), positions, window))
    out = torch.empty_like(q)
    result = attention.result().unflatten(2, (num_rows, -1)).transpose(1, 2).flatten(2, 3)
    out[tiles.rows] = result.to(q.dtype)
    return out


def cut_query_tiles(cu_seqlens_q: Tensor, context_lens: Tensor, num_rows: int) -> QueryTiles:
    """Cut the queries of every sequence into tiles of num_rows."""
    first_rows = cu_seqlens_q[:-1].long()
    lens = cu_seqlens_q[1:].long() - first_rows
    num_tiles = (lens + num_rows - 1) // num_rows
    sequences = torch.repeat_interleave(num_tiles)
    first_tiles = num_tiles.cumsum(0) - num_tiles
    offsets = (torch.arange(len(sequences), device=lens.device) - first_tiles[sequences]) * num_rows
    rows = offsets.unsqueeze(1) + torch.arange(num_rows, device=lens.device)
    rows = rows.minimum(lens[sequences, None] - 1)
    positions = rows + (context_lens - lens)[sequences, None]
    kv_lens, order = (positions[:, -1] + 1).sort(descending=True)
    rows = rows + first_rows[sequences, None]
    return QueryTiles(rows[order], positions[order], sequences[order], kv_lens.tolist())
