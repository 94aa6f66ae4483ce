"""RMSNorm with the residual add that precedes it, on a GPU; contract and reference: kernels/rms_norm.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.gpu import Gpu


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [num_tokens, hidden_size], rows x_stride apart
    residual_ptr,  # the same, or None
    weight_ptr,  # [hidden_size]
    out_ptr,  # [num_tokens, hidden_size]
    sum_ptr,  # [num_tokens, hidden_size], or None
    eps,
    x_stride,
    residual_stride,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # grid: (num_tokens,)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < HIDDEN_SIZE
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_column, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=is_column, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * HIDDEN_SIZE + columns, x, mask=is_column)
    hidden = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(hidden * hidden, 0) / HIDDEN_SIZE + eps)
    normalized = (hidden * scale).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * HIDDEN_SIZE + columns, normalized * weight, mask=is_column)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, gpu: Gpu) -> tuple[Tensor, Tensor]:
    """A row is read once and stays in registers.

    Bytes: num_tokens * hidden_size * itemsize * (2, with a residual 4). FLOPs: 4 a value. Bound by memory.
    """
    num_tokens, hidden_size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = None if residual is None else torch.empty_like(out)
    if num_tokens:
        _, options = gpu.tile("rms_norm")
        rms_norm_kernel[(num_tokens,)](
            x,
            residual,
            weight,
            out,
            total,
            eps,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            HIDDEN_SIZE=hidden_size,
            BLOCK=triton.next_power_of_2(hidden_size),
            **options,
        )
    return out, x if total is None else total
