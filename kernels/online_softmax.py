"""Attention over keys and values that come tile by tile; both attention references are built on it."""

import torch
from torch import Tensor

from kernels.paged_kv import LayerKV


class OnlineSoftmax:
    """Attention of many independent query groups, with the softmax corrected as tiles of keys arrive.

    Rows of one group share the keys. Mutated by update: the running row maximum, the sum of weights
    and the weighted sum of values. Source: Online normalizer calculation for softmax (2018), FlashAttention-2 (2023).
    """

    def __init__(self, q: Tensor, scale: float, softcap: float | None = None) -> None:
        """q: [num_groups, num_kv_heads, num_rows, head_dim]."""
        self._q = q.float() * scale
        self._softcap = softcap
        # Finite, so that a row which sees no key of a tile gives them a weight of 0, and not NaN.
        self._max = torch.full((*q.shape[:-1], 1), torch.finfo(torch.float32).min, device=q.device)
        self._sum = torch.zeros_like(self._max)
        self._out = torch.zeros_like(self._q)

    def update(self, k: Tensor, v: Tensor, is_visible: Tensor) -> None:
        """Let the first num_active groups see one more tile of keys.

        k, v:        [num_active, num_kv_heads, num_keys, head_dim] fp32; v is finite where no row may look,
                     since a weight of zero times NaN is NaN; k may be anything there
        is_visible:  [num_active, num_rows, num_keys] bool; each row sees a key of some tile
        """
        num_active = k.shape[0]
        old_max, old_sum, old_out = self._max[:num_active], self._sum[:num_active], self._out[:num_active]
        scores = self._q[:num_active] @ k.transpose(-1, -2)
        if self._softcap is not None:
            scores = self._softcap * torch.tanh(scores / self._softcap)
        scores.masked_fill_(~is_visible.unsqueeze(1), float("-inf"))
        new_max = torch.maximum(old_max, scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_max).exp_()
        correction = (old_max - new_max).exp_()
        old_sum.mul_(correction).add_(weights.sum(-1, keepdim=True))
        old_out.mul_(correction).add_(weights @ v)
        old_max.copy_(new_max)

    def result(self) -> Tensor:
        """[num_groups, num_kv_heads, num_rows, head_dim] fp32."""
        return self._out / self._sum


def sees(rows: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Whether a token at a row's position sees a key at its own: no later one, and none before the window."""
    if window is None:
        return keys <= rows
    return (keys <= rows) & (keys > rows - window)


def read_kv_tile(
    kv: LayerKV, block_tables: Tensor, context_lens: Tensor, start: int, num_keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Read keys start … start + num_keys - 1 of each sequence through its block table.

    block_tables:  [num_seqs, max_blocks]; entries past a sequence's last block are not followed
    context_lens:  [num_seqs]; values past it are returned as zeros, so garbage in free slots stays there
    start, num_keys: multiples of block_size
    Returns k and v, [num_seqs, num_kv_heads, num_keys, head_dim] fp32, and the keys' positions [num_keys];
    fewer keys where block tables end earlier.
    """
    block_size, device = kv.block_size, block_tables.device
    block_ids = block_tables[:, start // block_size : (start + num_keys) // block_size].long()
    positions = torch.arange(start, start + block_ids.shape[1] * block_size, device=device)
    is_past = positions >= context_lens.unsqueeze(1)
    block_ids = block_ids.masked_fill(is_past[:, ::block_size], 0)
    k, v = (part.float() for part in kv.read(block_ids))
    sequences, keys = is_past.nonzero(as_tuple=True)
    v[sequences, :, keys] = 0.0
    return k, v, positions
