"""The gated activation of a Gemma MLP, on a GPU; contract and reference: kernels/gelu_and_mul.py."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.gated import launch, load_gate, store_product
from kernels.triton.gpu import Gpu


@triton.jit
def gelu_and_mul_kernel(
    x_ptr,  # [num_tokens, 2 * size]
    out_ptr,  # [num_tokens, size]
    size,
    BLOCK: tl.constexpr,
):
    # grid: (num_tokens, cdiv(size, BLOCK))
    gate = load_gate(x_ptr, size, BLOCK)
    # (1 + tanh(y)) / 2 is the sigmoid of 2 * y; here 2 * sqrt(2 / pi) * (gate + 0.044715 * gate**3).
    twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    store_product(gate / (1 + tl.exp(-twice)), x_ptr, out_ptr, size, BLOCK)


def gelu_and_mul(x: Tensor, gpu: Gpu) -> Tensor:
    """x: contiguous.

    Bytes: 3 * num_tokens * intermediate_size * itemsize. FLOPs: 10 a value. Bound by memory.
    """
    return launch(gelu_and_mul_kernel, "gated", x, gpu)
