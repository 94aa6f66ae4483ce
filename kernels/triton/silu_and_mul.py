"""The gated activation of a Llama MLP, on a GPU; contract and reference: kernels/silu_and_mul.py."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.gpu import Gpu


@triton.jit
def silu_and_mul_kernel(
    x_ptr,  # [num_tokens, 2 * size]
    out_ptr,  # [num_tokens, size]
    size,
    BLOCK: tl.constexpr,
):
    # grid: (num_tokens, cdiv(size, BLOCK))
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    gate_ptr = x_ptr + 2 * row * size
    gate = tl.load(gate_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size + columns, mask=is_column, other=0.0)
    silu = (gate / (1 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
    tl.store(out_ptr + row * size + columns, silu * up.to(tl.float32), mask=is_column)


def silu_and_mul(x: Tensor, gpu: Gpu) -> Tensor:
    """x: contiguous.

    Bytes: 3 * num_tokens * intermediate_size * itemsize. FLOPs: 5 a value. Bound by memory.
    """
    num_tokens, size = x.shape[0], x.shape[1] // 2
    assert x.is_contiguous()
    out = x.new_empty(num_tokens, size)
    if num_tokens:
        sizes, options = gpu.tile("silu_and_mul")
        grid = (num_tokens, triton.cdiv(size, sizes["BLOCK"]))
        silu_and_mul_kernel[grid](x, out, size, **sizes, **options)
    return out
