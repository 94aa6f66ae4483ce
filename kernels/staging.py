"""Blocks on their way to another worker: packed into one contiguous buffer, and back."""

from torch import Tensor


def gather_blocks(blocks: Tensor, block_ids: Tensor, first_head: int, staging: Tensor) -> None:
    """Copy the same range of heads out of each of some blocks.

    blocks:     [num_blocks, num_kv_heads, head_values], what a head has of a block in one piece
    block_ids:  [n] int64, in any order
    staging:    [n, num_heads, head_values], contiguous, in the blocks' dtype; overwritten
    Bits are copied as they are.
    """
    staging.copy_(blocks[block_ids, first_head : first_head + staging.shape[1]])


def scatter_blocks(staging: Tensor, blocks: Tensor, block_ids: Tensor, first_head: int) -> None:
    """The way back: block_ids name each block at most once; other blocks and heads stay as they are."""
    blocks[block_ids, first_head : first_head + staging.shape[1]] = staging
