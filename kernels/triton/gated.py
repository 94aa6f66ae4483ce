"""What the gated activations share: both halves of a row are read, the product is written."""

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from kernels.triton.gpu import Gpu


@triton.jit
def load_gate(x_ptr, size, BLOCK: tl.constexpr):
    """This program's part of a row's first half, fp32."""
    gate_ptrs, mask = _places(x_ptr, 2 * size, size, BLOCK)
    return tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_product(activated, x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """Of what became of the gate, rounded, and the second half."""
    up_ptrs, mask = _places(x_ptr + size, 2 * size, size, BLOCK)
    up = tl.load(up_ptrs, mask=mask, other=0.0)
    out_ptrs, mask = _places(out_ptr, size, size, BLOCK)
    tl.store(out_ptrs, activated.to(up.dtype).to(tl.float32) * up.to(tl.float32), mask=mask)


@triton.jit
def _places(ptr, stride, size, BLOCK: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return ptr + tl.program_id(0).to(tl.int64) * stride + columns, columns < size


def launch(kernel: JITFunction, op: str, x: Tensor, gpu: Gpu) -> Tensor:
    """x: [num_tokens, 2 * size], contiguous."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    assert x.is_contiguous()
    out = x.new_empty(num_tokens, size)
    if num_tokens:
        sizes, options = gpu.tile(op)
        grid = (num_tokens, triton.cdiv(size, sizes["BLOCK"]))
        kernel[grid](x, out, size, **sizes, **options)
    return out
