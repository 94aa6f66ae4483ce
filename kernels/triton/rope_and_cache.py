"""Rotary positions and the write into the cache, on a GPU; contract and reference: kernels/rope_and_cache.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_kv import LayerKV
from kernels.triton.gpu import Gpu


@triton.jit
def rope_and_cache_kernel(
    q_ptr,  # [num_tokens, num_kv_heads * GROUP, 2 * HALF], tokens q_stride apart
    k_ptr,  # [num_tokens, num_kv_heads, 2 * HALF], tokens k_stride apart
    v_ptr,  # the same, v_stride
    q_out_ptr,  # as q, contiguous
    k_out_ptr,  # as k, contiguous
    cos_sin_ptr,  # [max_positions, 2 * HALF]
    positions_ptr,  # [num_tokens]
    slots_ptr,  # [num_tokens]
    keys_ptr,  # [num_blocks, num_kv_heads, 2 * HALF / PAIR, BLOCK_SIZE, PAIR]
    values_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE / PAIR, 2 * HALF, PAIR]
    q_stride,
    k_stride,
    v_stride,
    block_stride,
    head_stride,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    # grid: (num_tokens, num_kv_heads)
    HEAD_DIM: tl.constexpr = 2 * HALF
    token, kv_head, num_kv_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    dims, heads = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_HEADS)
    is_dim = dims < HALF
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * HEAD_DIM
    cos = tl.load(angles + dims, mask=is_dim, other=0.0)
    sin = tl.load(angles + HALF + dims, mask=is_dim, other=0.0)

    # The queries of this head's group.
    places = (kv_head * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    is_place = (heads < GROUP)[:, None] & is_dim[None, :]
    q = q_ptr + token * q_stride + places
    first, second = _rotate(q, q + HALF, is_place, cos[None, :], sin[None, :])
    q_out = q_out_ptr + token * num_kv_heads * GROUP * HEAD_DIM + places
    tl.store(q_out, first, mask=is_place)
    tl.store(q_out + HALF, second, mask=is_place)

    k = k_ptr + token * k_stride + kv_head * HEAD_DIM + dims
    first, second = _rotate(k, k + HALF, is_dim, cos, sin)
    k_out = k_out_ptr + (token * num_kv_heads + kv_head) * HEAD_DIM + dims
    tl.store(k_out, first, mask=is_dim)
    tl.store(k_out + HALF, second, mask=is_dim)

    slot = tl.load(slots_ptr + token)
    block, offset = slot // BLOCK_SIZE * block_stride + kv_head.to(tl.int64) * head_stride, slot % BLOCK_SIZE
    keys = keys_ptr + block + offset * PAIR
    late = dims + HALF
    tl.store(keys + dims // PAIR * (BLOCK_SIZE * PAIR) + dims % PAIR, first, mask=is_dim)
    tl.store(keys + late // PAIR * (BLOCK_SIZE * PAIR) + late % PAIR, second, mask=is_dim)
    v = v_ptr + token * v_stride + kv_head * HEAD_DIM + dims
    values = values_ptr + block + offset // PAIR * (HEAD_DIM * PAIR) + offset % PAIR + dims * PAIR
    tl.store(values, tl.load(v, mask=is_dim), mask=is_dim)
    tl.store(values + HALF * PAIR, tl.load(v + HALF, mask=is_dim), mask=is_dim)


@triton.jit
def _rotate(first_ptr, second_ptr, mask, cos, sin):
    first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_ptr, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


def rope_and_cache(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, kv: LayerKV, slot_mapping: Tensor, gpu: Gpu
) -> tuple[Tensor, Tensor]:
    """q, k, v: the heads of a token lie side by side, as in the result of one linear.

    Bytes: num_tokens * head_dim * itemsize * (2 * num_heads + 5 * num_kv_heads). FLOPs: 3 a value of q and k. Bound by
    memory. A token's key is as many pieces of a word as there are words; tokens of a prompt fill them up in the cache.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.num_kv_heads
    assert all(x.stride()[1:] == (head_dim, 1) for x in (q, k, v)), "heads lie side by side"
    assert kv.keys.stride()[:2] == kv.values.stride()[:2], "keys and values lie alike"
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    if num_tokens:
        _, options = gpu.tile("rope_and_cache")
        rope_and_cache_kernel[(num_tokens, num_kv_heads)](
            *(q, k, v, q_out, k_out, cos_sin, positions, slot_mapping, kv.keys, kv.values),
            *(q.stride(0), k.stride(0), v.stride(0), kv.keys.stride(0), kv.keys.stride(1)),
            GROUP=num_heads // num_kv_heads,
            HALF=head_dim // 2,
            PAIR=kv.keys.shape[4],
            BLOCK_SIZE=kv.block_size,
            BLOCK_HEADS=triton.next_power_of_2(num_heads // num_kv_heads),
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
            **options,
        )
    return q_out, k_out
