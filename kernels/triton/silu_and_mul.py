"""The gated activation of a Llama MLP, on a GPU; contract and reference: kernels/silu_and_mul.py."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.gated import launch, load_gate, store_product
from kernels.triton.gpu import Gpu


@triton.jit
def silu_and_mul_kernel(
    x_ptr,  # [num_tokens, 2 * size]
    out_ptr,  # [num_tokens, size]
    size,
    BLOCK: tl.constexpr,
):
    # grid: (num_tokens, cdiv(size, BLOCK))
    gate = load_gate(x_ptr, size, BLOCK)
    store_product(gate / (1 + tl.exp(-gate)), x_ptr, out_ptr, size, BLOCK)


def silu_and_mul(x: Tensor, gpu: Gpu) -> Tensor:
    """x: contiguous.

    Bytes: 3 * num_tokens * intermediate_size * itemsize. FLOPs: 5 a value. Bound by memory.
    """
    return launch(silu_and_mul_kernel, "gated", x, gpu)
