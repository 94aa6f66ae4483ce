"""Attention of one new token per sequence, on a GPU; contract and reference: kernels/decode_attention.py.

A sequence's keys are split over programs, so that few sequences with long contexts fill the GPU too, and a second
kernel puts the parts together. Source: Flash-Decoding (2023).
"""

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

PROGRAMS_PER_PROCESSOR = 2
"""As many as run at once on a processor with the tiles of tiles.py; not measured."""
MIN_KEYS = 128
"""Of a split: fewer would be read in less time than it takes to put them together; not measured."""
MAX_SPLITS = 64
"""What the second kernel holds in registers."""


@triton.jit(do_not_specialize=["table_stride"])
def decode_attention_kernel(
    q_ptr,  # [num_seqs, num_heads, HEAD_DIM]
    keys_ptr,  # words: [num_blocks, num_kv_heads, HEAD_DIM / PAIR, BLOCK_SIZE]
    values_ptr,  # words: [num_blocks, num_kv_heads, BLOCK_SIZE / PAIR, HEAD_DIM]
    block_tables_ptr,  # [num_seqs, max_blocks]
    context_lens_ptr,  # [num_seqs]
    out_ptr,  # [num_seqs, num_heads, num_splits, HEAD_DIM]
    lse_ptr,  # [num_seqs, num_heads, num_splits]: log2 of the sum of weights; -inf of a split without keys
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
    BLOCK_M: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # grid: (num_seqs, num_kv_heads, num_splits)
    seq, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    num_kv_heads, num_splits = tl.num_programs(1), tl.num_programs(2)
    rows = tl.arange(0, BLOCK_M)
    is_row = rows < GROUP
    heads = kv_head * GROUP + rows
    out_rows = (seq * num_kv_heads * GROUP + heads) * num_splits + split

    context_len = tl.load(context_lens_ptr + seq)
    first_key = first_seen(context_len - 1, window)
    first_tile = first_key // BLOCK_N
    num_keys = tl.cdiv(tl.cdiv(context_len, BLOCK_N) - first_tile, num_splits) * BLOCK_N
    start = first_tile * BLOCK_N + split * num_keys
    end = tl.minimum(start + num_keys, context_len)
    if start >= end:
        tl.store(lse_ptr + out_rows, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=is_row)
        return

    q_ptr += seq * q_stride
    q_low, q_high = load_queries(q_ptr, heads * q_head_stride, is_row, HEAD_DIM, PAIR, BLOCK_WORDS)
    head_offset = kv_head.to(tl.int64) * head_stride
    keys_ptr += head_offset
    values_ptr += head_offset
    block_table = block_tables_ptr + seq * table_stride
    last_keys = tl.full((BLOCK_M,), context_len - 1, tl.int32)
    whole_end = end // BLOCK_N * BLOCK_N
    whole_start = tl.minimum(tl.maximum(start, tl.cdiv(first_key, BLOCK_N) * BLOCK_N), whole_end)
    out, lse = attention_of(
        *(q_low, q_high, last_keys, keys_ptr, values_ptr, block_table, block_stride),
        *(start, whole_start, whole_end, end, scale_log2, window, softcap_log2, HEAD_DIM, PAIR, BLOCK_SIZE, BLOCK_N),
    )
    store_rows(out_ptr, out_rows, is_row, out, HEAD_DIM)
    tl.store(lse_ptr + out_rows, lse, mask=is_row)


@triton.jit(do_not_specialize=["num_splits"])
def reduce_splits_kernel(
    parts_ptr,  # [num_rows, num_splits, HEAD_DIM]
    lse_ptr,  # [num_rows, num_splits]
    out_ptr,  # [num_rows, HEAD_DIM]
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
):
    # grid: (num_rows,)
    row = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_DIMS)
    lse = tl.load(lse_ptr + row * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))
    # What a split without keys left in its part is nothing to be read.
    is_value = (lse > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    places = parts_ptr + (row * num_splits + splits)[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(places, mask=is_value, other=0.0)
    out = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + row * HEAD_DIM + dims, out, mask=dims < HEAD_DIM)


def decode_attention(
    q: Tensor,
    kv: LayerKV,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    gpu: Gpu,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """How many splits there are follows from the width of block_tables: no length is waited for.

    Bytes: 2 * sum(context_lens) * num_kv_heads * head_dim * itemsize. FLOPs: 4 * sum(context_lens) * num_heads *
    head_dim, padded to 16 rows a KV head. Of a context no more than its window counts, in whole tiles. The parts of
    splits are 8 * num_seqs * num_heads * num_splits * head_dim bytes more. Bound by memory.
    """
    num_seqs, num_heads, head_dim = q.shape
    assert q.dtype == kv.dtype, f"queries of {q.dtype}, keys of {kv.dtype}"
    assert q.stride(2) == 1
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not num_seqs:
        return out
    sizes, options = gpu.attention_tile("decode_attention", q)
    num_kv_heads, group = kv.num_kv_heads, num_heads // kv.num_kv_heads
    max_context = block_tables.shape[1] * kv.block_size
    if window is not None:
        max_context = min(max_context, window)
    num_splits = choose_num_splits(num_seqs * num_kv_heads, max_context, gpu.num_processors)
    parts = out if num_splits == 1 else q.new_empty(num_seqs, num_heads, num_splits, head_dim, dtype=torch.float32)
    lse = q.new_empty(num_seqs, num_heads, num_splits, dtype=torch.float32)
    keys, values, pair = words_of(kv)
    decode_attention_kernel[(num_seqs, num_kv_heads, num_splits)](
        *(q, keys, values, block_tables, context_lens, parts, lse),
        *(scale * LOG2_E, window, None if softcap is None else softcap * LOG2_E),
        *(q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), block_tables.stride(0)),
        GROUP=group,
        HEAD_DIM=head_dim,
        PAIR=pair,
        BLOCK_SIZE=kv.block_size,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_WORDS=block_words(head_dim, pair),
        **sizes,
        **options,
    )
    if num_splits > 1:
        _, options = gpu.tile("reduce_splits")
        reduce_splits_kernel[(num_seqs * num_heads,)](
            *(parts, lse, out, num_splits),
            HEAD_DIM=head_dim,
            BLOCK_SPLITS=triton.next_power_of_2(num_splits),
            BLOCK_DIMS=triton.next_power_of_2(head_dim),
            **options,
        )
    return out


def choose_num_splits(num_rows: int, max_context: int, num_processors: int) -> int:
    """Into how many parts keys are split: enough to fill the GPU, none of them too small to be worth it.

    num_rows: sequences times KV heads, each a program where nothing is split
    """
    wanted = num_processors * PROGRAMS_PER_PROCESSOR // num_rows
    return max(1, min(wanted, max_context // MIN_KEYS, MAX_SPLITS))
