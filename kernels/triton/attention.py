"""Attention over paged keys and values that come tile by tile: what both attention kernels are built on.

Keys and values are read as the 32-bit words of kernels/paged_kv.py, in which a row is one piece, so that a load is as
wide as the hardware has it. Of 16-bit values a word of keys has two dimensions and one of values two tokens: each
product is the sum of one with the low halves and one with the high halves, and nothing has to be put in another order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_kv import LayerKV

LOG2_E = 1.4426950408889634


@triton.jit
def load_queries(q_ptr, row_offsets, is_row, HEAD_DIM: tl.constexpr, PAIR: tl.constexpr, BLOCK_WORDS: tl.constexpr):
    """Rows of queries, [ROWS, BLOCK_WORDS], of even and of odd dimensions; twice the same where a word is one value."""
    words = tl.arange(0, BLOCK_WORDS)
    is_value = is_row[:, None] & (words < HEAD_DIM // PAIR)[None, :]
    places = q_ptr + row_offsets[:, None] + words[None, :] * PAIR
    low = tl.load(places, mask=is_value, other=0.0)
    high = low
    if PAIR == 2:
        high = tl.load(places + 1, mask=is_value, other=0.0)
    return low, high


@triton.jit
def store_rows(out_ptr, row_ids, is_row, out, HEAD_DIM: tl.constexpr):
    """out: [ROWS, BLOCK_DIMS]."""
    dims = tl.arange(0, out.shape[1])
    places = out_ptr + row_ids[:, None] * HEAD_DIM + dims[None, :]
    tl.store(places, out, mask=is_row[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def first_seen(position, window):
    """The first key that the token at a position sees."""
    if window is None:
        return 0
    else:
        return tl.maximum(position + 1 - window, 0)


@triton.jit
def halves(words, dtype: tl.constexpr):
    """The low and the high halves of words, as values."""
    low = (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    return low, (words >> 16).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def load_if(places, mask, IS_MASKED: tl.constexpr):
    # A mask by token would make loads as narrow as a word.
    if IS_MASKED:
        return tl.load(places, mask=mask, other=0)
    else:
        return tl.load(places)


@triton.jit
def find_blocks(block_table, rows, BLOCK_ROWS: tl.constexpr, block_stride, mask, IS_MASKED: tl.constexpr):
    """Where the blocks begin that have some rows of a sequence, of which a block has BLOCK_ROWS."""
    return load_if(block_table + rows // BLOCK_ROWS, mask, IS_MASKED).to(tl.int64) * block_stride


@triton.jit
def score_tile(
    q_low,
    q_high,
    keys_ptr,
    block_table,
    block_stride,
    tokens,
    num_keys,
    HEAD_DIM: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """[ROWS, BLOCK_N] fp32, not scaled."""
    words = tl.arange(0, q_low.shape[1])
    is_token = tokens < num_keys
    blocks = find_blocks(block_table, tokens, BLOCK_SIZE, block_stride, is_token, IS_MASKED)
    places = keys_ptr + words[:, None] * BLOCK_SIZE + (blocks + tokens % BLOCK_SIZE)[None, :]
    IS_PADDED: tl.constexpr = q_low.shape[1] * PAIR != HEAD_DIM
    mask = (words < HEAD_DIM // PAIR)[:, None]
    if IS_MASKED:
        mask = mask & is_token[None, :]
    k = load_if(places, mask, IS_MASKED or IS_PADDED)
    if PAIR == 2:
        k_low, k_high = halves(k, q_low.dtype)
        return tl.dot(q_high, k_high, tl.dot(q_low, k_low))
    else:
        return tl.dot(q_low, k, input_precision="ieee")


@triton.jit
def add_values(
    acc,
    weights,
    dtype: tl.constexpr,
    values_ptr,
    block_table,
    block_stride,
    first,
    num_keys,
    HEAD_DIM: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """acc + weights [ROWS, BLOCK_N] @ the values of the tokens from first on, [BLOCK_N, BLOCK_DIMS]."""
    dims = tl.arange(0, acc.shape[1])
    rows = first // PAIR + tl.arange(0, weights.shape[1] // PAIR)
    is_row = rows * PAIR < num_keys
    blocks = find_blocks(block_table, rows, BLOCK_SIZE // PAIR, block_stride, is_row, IS_MASKED)
    places = values_ptr + (blocks + rows % (BLOCK_SIZE // PAIR) * HEAD_DIM)[:, None] + dims[None, :]
    IS_PADDED: tl.constexpr = acc.shape[1] != HEAD_DIM
    mask = (dims < HEAD_DIM)[None, :]
    if IS_MASKED:
        mask = mask & is_row[:, None]
    v = load_if(places, mask, IS_MASKED or IS_PADDED)
    if PAIR == 2:
        v_low, v_high = halves(v, dtype)
        if IS_MASKED:  # what is in a slot that nobody wrote may be NaN, whatever weight it gets
            v_high = tl.where((rows * 2 + 1 < num_keys)[:, None], v_high, 0.0)
        pairs = tl.reshape(weights.to(dtype), (weights.shape[0], weights.shape[1] // 2, 2))
        low, high = tl.split(pairs)
        return tl.dot(high, v_high, tl.dot(low, v_low, acc))
    else:
        return tl.dot(weights, v, acc, input_precision="ieee")


@triton.jit
def cap(scores, softcap):
    """softcap * tanh(scores / softcap); any unit."""
    # tanh(y) = 1 - 2 / (1 + e**(2 * y)), and 2 * log2(e) = 2.885…
    return softcap * (1 - 2 / (1 + tl.exp2(scores * (2.8853900817779268 / softcap))))


@triton.jit
def attend(
    acc,  # [ROWS, BLOCK_DIMS] fp32: weighted sum of values
    row_max,  # [ROWS]
    row_sum,  # [ROWS]
    q_low,
    q_high,
    last_keys,  # [ROWS]: the last key that each row sees
    keys_ptr,  # words of one head: [num_blocks, HEAD_DIM / PAIR, BLOCK_SIZE], blocks block_stride apart
    values_ptr,  # the same: [num_blocks, BLOCK_SIZE / PAIR, HEAD_DIM]
    block_table,
    block_stride,
    start,  # a multiple of BLOCK_N
    end,
    scale_log2,  # of scores, for powers of 2
    window,  # how many keys a row sees, or None
    softcap_log2,  # of scores as they are scaled, or None
    HEAD_DIM: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEES_ALL: tl.constexpr,  # every row sees every key
    IS_WHOLE: tl.constexpr,  # end is a multiple of BLOCK_N too
):
    """Let rows see the keys start … end - 1. Source: FlashAttention-2 (2023)."""
    for first in range(start, end, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N)
        scores = score_tile(
            *(q_low, q_high, keys_ptr, block_table, block_stride, tokens, end),
            *(HEAD_DIM, PAIR, BLOCK_SIZE, not IS_WHOLE),
        )
        scores *= scale_log2
        if softcap_log2 is not None:
            scores = cap(scores, softcap_log2)
        if not SEES_ALL:
            is_seen = tokens[None, :] <= last_keys[:, None]
            if window is not None:
                is_seen = is_seen & (tokens[None, :] > last_keys[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(weights, 1)
        row_max = new_max
        acc = add_values(
            *(acc * correction[:, None], weights, q_low.dtype, values_ptr, block_table, block_stride, first, end),
            *(HEAD_DIM, PAIR, BLOCK_SIZE, not IS_WHOLE),
        )
    return acc, row_max, row_sum


@triton.jit
def attention_of(
    q_low,
    q_high,
    last_keys,
    keys_ptr,
    values_ptr,
    block_table,
    block_stride,
    start,
    whole_start,  # from here on
    whole_end,  # and up to here every row sees every key; multiples of BLOCK_N, as start
    end,
    scale_log2,
    window,
    softcap_log2,
    HEAD_DIM: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attention to the keys start … end - 1: (out, [ROWS, BLOCK_DIMS] fp32, and log2 of the sum of weights, [ROWS])."""
    acc = tl.zeros((q_low.shape[0], q_low.shape[1] * PAIR), tl.float32)
    row_sum = tl.zeros((q_low.shape[0],), tl.float32)
    # Finite, so that a row which sees no key of a tile gives them a weight of 0, and not NaN.
    row_max = row_sum - 3.4028234663852886e38
    if window is not None:
        acc, row_max, row_sum = attend(
            *(acc, row_max, row_sum, q_low, q_high, last_keys, keys_ptr, values_ptr, block_table, block_stride),
            *(start, whole_start, scale_log2, window, softcap_log2, HEAD_DIM, PAIR, BLOCK_SIZE, BLOCK_N, False, True),
        )
    acc, row_max, row_sum = attend(
        *(acc, row_max, row_sum, q_low, q_high, last_keys, keys_ptr, values_ptr, block_table, block_stride),
        *(whole_start, whole_end, scale_log2, window, softcap_log2, HEAD_DIM, PAIR, BLOCK_SIZE, BLOCK_N, True, True),
    )
    acc, row_max, row_sum = attend(
        *(acc, row_max, row_sum, q_low, q_high, last_keys, keys_ptr, values_ptr, block_table, block_stride),
        *(whole_end, end, scale_log2, window, softcap_log2, HEAD_DIM, PAIR, BLOCK_SIZE, BLOCK_N, False, False),
    )
    return acc / row_sum[:, None], row_max + tl.log2(row_sum)


def words_of(kv: LayerKV) -> tuple[Tensor, Tensor, int]:
    """The cache as words: [num_blocks, num_kv_heads, head_dim / pair, block_size], the values, and pair."""
    pair = kv.keys.shape[4]
    assert kv.keys.stride()[:2] == kv.values.stride()[:2], "keys and values lie alike"
    assert kv.keys[0, 0].is_contiguous(), "a head's keys are one piece"
    assert kv.values[0, 0].is_contiguous(), "a head's values are one piece"
    if pair == 1:
        return kv.keys.squeeze(4), kv.values.squeeze(4), pair
    return kv.keys.view(torch.int32).squeeze(4), kv.values.view(torch.int32).squeeze(4), pair


def block_words(head_dim: int, pair: int) -> int:
    """Words of a row of queries, padded to what a product takes: a power of two, and at least 16."""
    return max(16, triton.next_power_of_2(head_dim // pair))
