"""Blocks into a staging buffer and back, on a GPU; contracts and references: kernels/staging.py."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.gpu import Gpu


@triton.jit
def staging_kernel(
    blocks_ptr,  # [num_blocks, num_kv_heads, head_values], from the first head that is copied
    block_ids_ptr,  # [n]
    staging_ptr,  # [n, num_heads, head_values]
    block_stride,
    num_values,  # of a block's heads that are copied: one piece
    IS_GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # grid: (n, cdiv(num_values, BLOCK))
    row = tl.program_id(0).to(tl.int64)
    values = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_value = values < num_values
    in_block = blocks_ptr + tl.load(block_ids_ptr + row) * block_stride + values
    in_staging = staging_ptr + row * num_values + values
    if IS_GATHER:
        tl.store(in_staging, tl.load(in_block, mask=is_value), mask=is_value)
    else:
        tl.store(in_block, tl.load(in_staging, mask=is_value), mask=is_value)


def gather_blocks(blocks: Tensor, block_ids: Tensor, first_head: int, staging: Tensor, gpu: Gpu) -> None:
    """Bytes: 2 * those of staging. No FLOPs. Bound by memory."""
    _copy(blocks, block_ids, first_head, staging, gpu, is_gather=True)


def scatter_blocks(staging: Tensor, blocks: Tensor, block_ids: Tensor, first_head: int, gpu: Gpu) -> None:
    """As gather_blocks."""
    _copy(blocks, block_ids, first_head, staging, gpu, is_gather=False)


def _copy(blocks: Tensor, block_ids: Tensor, first_head: int, staging: Tensor, gpu: Gpu, *, is_gather: bool) -> None:
    assert blocks.stride()[1:] == (blocks.shape[2], 1), "a block is one piece"
    assert staging.is_contiguous()
    assert first_head + staging.shape[1] <= blocks.shape[1], "heads that a block does not have"
    num_values = staging[0].numel() if len(staging) else 0
    if num_values:
        sizes, options = gpu.tile("staging")
        grid = (len(staging), triton.cdiv(num_values, sizes["BLOCK"]))
        heads = blocks[:, first_head:]
        arguments = (heads, block_ids, staging, blocks.stride(0), num_values)
        staging_kernel[grid](*arguments, IS_GATHER=is_gather, **sizes, **options)
