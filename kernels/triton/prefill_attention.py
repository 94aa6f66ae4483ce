"""Attention of ragged runs of new tokens, on a GPU; contract and reference: kernels/prefill_attention.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_kv import LayerKV
from kernels.triton.attention import (
    LOG2_E,
    attention_of,
    block_words,
    first_seen,
    load_queries,
    store_rows,
    words_of,
)
from kernels.triton.gpu import Gpu


@triton.jit(do_not_specialize=["table_stride"])
def prefill_attention_kernel(
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    keys_ptr,  # words: [num_blocks, num_kv_heads, HEAD_DIM / PAIR, BLOCK_SIZE]
    values_ptr,  # words: [num_blocks, num_kv_heads, BLOCK_SIZE / PAIR, HEAD_DIM]
    cu_seqlens_ptr,  # [num_seqs + 1]
    context_lens_ptr,  # [num_seqs]
    block_tables_ptr,  # [num_seqs, max_blocks]
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    scale_log2,
    window,  # or None
    softcap_log2,  # or None
    q_stride,
    q_head_stride,
    block_stride,
    head_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # grid: (cdiv(max_seqlen, BLOCK_M // GROUP), num_kv_heads, num_seqs)
    # A tile has all heads of a group, which share their keys, of as many tokens as there is room for.
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head, num_kv_heads, seq = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    first_row = tl.load(cu_seqlens_ptr + seq)
    num_tokens = tl.load(cu_seqlens_ptr + seq + 1) - first_row
    # Tiles that see most keys come first, so that none of them is left alone at the end.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_TOKENS
    if first >= num_tokens:
        return

    rows = tl.arange(0, BLOCK_M)
    tokens = first + rows // GROUP
    is_row = (rows < TILE_TOKENS * GROUP) & (tokens < num_tokens)
    prefix = tl.load(context_lens_ptr + seq) - num_tokens
    end = prefix + tl.minimum(first + TILE_TOKENS, num_tokens)
    last_keys = tl.minimum(prefix + tokens, end - 1)
    heads = kv_head * GROUP + rows % GROUP
    row_ids = (first_row + tokens).to(tl.int64)
    row_offsets = row_ids * q_stride + heads * q_head_stride
    q_low, q_high = load_queries(q_ptr, row_offsets, is_row, HEAD_DIM, PAIR, BLOCK_WORDS)
    head_offset = kv_head.to(tl.int64) * head_stride
    keys_ptr += head_offset
    values_ptr += head_offset
    block_table = block_tables_ptr + seq * table_stride
    # Up to here even the first token of the tile sees every key.
    whole_end = (prefix + first + 1) // BLOCK_N * BLOCK_N
    start = first_seen(prefix + first, window) // BLOCK_N * BLOCK_N
    whole_start = tl.minimum(tl.cdiv(first_seen(end - 1, window), BLOCK_N) * BLOCK_N, whole_end)
    out, _ = attention_of(
        *(q_low, q_high, last_keys, keys_ptr, values_ptr, block_table, block_stride),
        *(start, whole_start, whole_end, end, scale_log2, window, softcap_log2, HEAD_DIM, PAIR, BLOCK_SIZE, BLOCK_N),
    )
    store_rows(out_ptr, row_ids * num_kv_heads * GROUP + heads, is_row, out, HEAD_DIM)


def prefill_attention(
    q: Tensor,
    kv: LayerKV,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    max_seqlen_q: int,
    gpu: Gpu,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """A sequence without queries is passed over.

    FLOPs: 4 * num_heads * head_dim for each pair of a token and a key that it sees, in whole tiles. Bytes: q and out
    once, the keys and values that it sees once for each tile of tokens. Bound by products where a sequence has more
    than a few hundred tokens.
    """
    num_tokens, num_heads, head_dim = q.shape
    assert q.dtype == kv.dtype, f"queries of {q.dtype}, keys of {kv.dtype}"
    assert q.stride(2) == 1
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not num_tokens:
        return out
    sizes, options = gpu.attention_tile("prefill_attention", q)
    num_kv_heads, group = kv.num_kv_heads, num_heads // kv.num_kv_heads
    assert group <= sizes["BLOCK_M"], f"{group} heads share keys, a tile has {sizes['BLOCK_M']} rows"
    keys, values, pair = words_of(kv)
    num_tiles = triton.cdiv(max_seqlen_q, sizes["BLOCK_M"] // group)
    prefill_attention_kernel[(num_tiles, num_kv_heads, len(context_lens))](
        *(q, keys, values, cu_seqlens_q, context_lens, block_tables, out),
        *(scale * LOG2_E, window, None if softcap is None else softcap * LOG2_E),
        *(q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), block_tables.stride(0)),
        GROUP=group,
        HEAD_DIM=head_dim,
        PAIR=pair,
        BLOCK_SIZE=kv.block_size,
        BLOCK_WORDS=block_words(head_dim, pair),
        **sizes,
        **options,
    )
    return out
