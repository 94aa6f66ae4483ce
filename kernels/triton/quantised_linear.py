"""A linear layer of weights in 8 or 4 bits, on a GPU; contract and reference: kernels/quantised_linear.py."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.quantised_linear import GROUP, QuantisedWeight
from kernels.triton.gpu import Gpu


@triton.jit
def quantised_linear_kernel(
    x_ptr,  # [num_tokens, in_size], rows x_stride apart
    integers_ptr,  # [out_size, num_groups, GROUP * BITS / 8]
    scale_ptr,  # [out_size, num_groups]
    offset_ptr,  # the same
    bias_ptr,  # [out_size], or None
    out_ptr,  # [num_tokens, out_size]
    num_tokens,
    in_size,
    out_size,
    num_groups,
    x_stride,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # grid: (cdiv(num_tokens, BLOCK_M), cdiv(out_size, BLOCK_N)): tiles that share their weights follow each other
    GROUP_BYTES: tl.constexpr = GROUP * BITS // 8
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_tokens, columns < out_size
    row_ptrs = x_ptr + rows.to(tl.int64) * x_stride
    first_groups = columns.to(tl.int64) * num_groups
    in_group = tl.arange(0, GROUP_BYTES)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, num_groups, BLOCK_K // GROUP):
        groups = first + tl.arange(0, BLOCK_K // GROUP)
        is_group = is_column[:, None] & (groups < num_groups)[None, :]
        places = first_groups[:, None] + groups[None, :]
        scale = tl.load(scale_ptr + places, mask=is_group, other=0.0).to(tl.float32)
        offset = tl.load(offset_ptr + places, mask=is_group, other=0.0).to(tl.float32)
        q_ptrs = integers_ptr + places[:, :, None] * GROUP_BYTES + in_group[None, None, :]
        q = tl.load(q_ptrs, mask=is_group[:, :, None], other=0)
        inputs = groups[:, None] * GROUP + in_group[None, :]
        if BITS == 8:
            acc = add_products(acc, row_ptrs, is_row, inputs, in_size, q, scale, offset)
        else:
            acc = add_products(acc, row_ptrs, is_row, inputs, in_size, q & 15, scale, offset)
            acc = add_products(acc, row_ptrs, is_row, inputs + GROUP_BYTES, in_size, q >> 4, scale, offset)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_size + columns[None, :]
    tl.store(out_ptrs, acc, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def add_products(
    acc,  # [BLOCK_M, BLOCK_N] fp32
    row_ptrs,  # [BLOCK_M]
    is_row,  # [BLOCK_M]
    inputs,  # [GROUPS, n]: those of q
    in_size,
    q,  # [BLOCK_N, GROUPS, n]
    scale,  # [BLOCK_N, GROUPS] fp32
    offset,  # the same
):
    """acc + x @ weights, of some inputs of each group."""
    weights = q.to(tl.float32) * scale[:, :, None] + offset[:, :, None]
    weights = tl.reshape(weights, (q.shape[0], q.shape[1] * q.shape[2]))
    inputs = tl.reshape(inputs, (weights.shape[1],))
    is_input = is_row[:, None] & (inputs < in_size)[None, :]
    x = tl.load(row_ptrs[:, None] + inputs[None, :], mask=is_input, other=0.0)
    return tl.dot(x, tl.trans(weights.to(x.dtype)), acc, input_precision="ieee")


def quantised_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, gpu: Gpu) -> Tensor:
    """x: contiguous in the last dim.

    Bytes: out * in * (bits / 8 + 1 / 8), and of x and out num_tokens * (in + out) * itemsize. FLOPs: 2 * num_tokens *
    in * out, of which rows are padded to 16. Bound by memory up to some hundred rows, then by products.
    """
    num_tokens, in_size = x.shape
    assert in_size == weight.in_size, f"{in_size} inputs, a weight of {weight.in_size}"
    assert x.stride(1) == 1
    assert all(part.is_contiguous() for part in (weight.integers, weight.scale, weight.offset))
    out_size, num_groups = weight.scale.shape
    out = x.new_empty(num_tokens, out_size)
    if num_tokens:
        sizes, options = gpu.linear_tile("quantised_linear", x)
        grid = (triton.cdiv(num_tokens, sizes["BLOCK_M"]), triton.cdiv(out_size, sizes["BLOCK_N"]))
        quantised_linear_kernel[grid](
            *(x, weight.integers, weight.scale, weight.offset, bias, out),
            *(num_tokens, in_size, out_size, num_groups, x.stride(0)),
            GROUP=GROUP,
            BITS=weight.bits,
            **sizes,
            **options,
        )
    return out
