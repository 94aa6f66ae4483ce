"""Paged batches with poison in every slot that nobody may read, and attention in fp64 to compare with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.paged_kv import LayerKV, values_per_word

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
"""Largest difference allowed from fp64, for values of order 1.

float32: sums of up to some hundred terms, 2**-24 each, with room for another order of adding.
bfloat16: inputs are exact and sums fp32; only the output is rounded, by at most 2**-8 of values up to 2.5.
"""


@dataclass
class PagedBatch:
    """Keys and values per sequence as they were written, and the cache they went to, in random block order."""

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    kv: LayerKV
    block_tables: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    scale: float

    @property
    def max_seqlen_q(self) -> int:
        return int(self.cu_seqlens_q.diff().max())

    def expected(self, window: int | None = None, softcap: float | None = None) -> Tensor:
        """Causal attention of every query, dense and in fp64."""
        starts = self.cu_seqlens_q.tolist()
        outs = [
            dense_attention(self.q[start:end], k, v, self.scale, window, softcap)
            for start, end, k, v in zip(starts[:-1], starts[1:], self.keys, self.values, strict=True)
        ]
        return torch.cat(outs)

    def poison(self, sequence: int, end: int) -> None:
        """Put NaN in the place of a sequence's keys and values before end, a multiple of block_size."""
        block_ids = self.block_tables[sequence, : end // self.kv.block_size].long()
        self.kv.keys[block_ids] = float("nan")
        self.kv.values[block_ids] = float("nan")


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """q: [num_queries, num_heads, head_dim], the last of k, v: [context_len, num_kv_heads, head_dim]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    ages = torch.arange(len(k) - len(q), len(k)).unsqueeze(1) - torch.arange(len(k))
    is_hidden = (ages < 0) if window is None else (ages < 0) | (ages >= window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(is_hidden, float("-inf")).softmax(-1), v)


def make_paged_batch(
    query_lens: list[int],
    context_lens: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int = 16,
    seed: int = 0,
) -> PagedBatch:
    """A random batch in one layer of a strided cache. Free slots, free blocks and other layers hold NaN.

    All of it is on the device where tensors are by default.
    """
    random = torch.Generator(torch.get_default_device()).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    num_blocks = [-(-length // block_size) for length in context_lens]
    kv = make_kv(sum(num_blocks) + 3, num_kv_heads, block_size, head_dim, dtype)
    # What follows a table's last block is no block at all.
    block_tables = torch.full((len(context_lens), max(num_blocks) + 2), 2**30, dtype=torch.int32)
    free = torch.randperm(len(kv.keys), generator=random).int().split([*num_blocks, 3])
    keys = [normal(length, num_kv_heads, head_dim) for length in context_lens]
    values = [normal(length, num_kv_heads, head_dim) for length in context_lens]
    for table, block_ids, k, v in zip(block_tables, free, keys, values, strict=False):
        table[: len(block_ids)] = block_ids
        write_unrotated(k, v, kv, block_ids)
    return PagedBatch(
        q=normal(sum(query_lens), num_heads, head_dim),
        keys=keys,
        values=values,
        kv=kv,
        block_tables=block_tables,
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        scale=head_dim**-0.5,
    )


def make_kv(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, fill: float = float("nan")
) -> LayerKV:
    """The middle one of three layers of a cache."""
    pair = values_per_word(dtype)
    whole = torch.full((num_blocks, num_kv_heads, 3, 2, block_size * head_dim), fill, dtype=dtype)
    keys = whole[:, :, 1, 0].unflatten(2, (head_dim // pair, block_size, pair))
    return LayerKV(keys, whole[:, :, 1, 1].unflatten(2, (block_size // pair, head_dim, pair)))


def write_unrotated(k: Tensor, v: Tensor, kv: LayerKV, block_ids: Tensor) -> None:
    """Write a whole sequence, token by token, with nothing but indices."""
    block_size, pair = kv.block_size, kv.keys.shape[4]
    for position in range(len(k)):
        block_id, offset = int(block_ids[position // block_size]), position % block_size
        kv.keys[block_id, :, :, offset] = k[position].unflatten(1, (-1, pair))
        kv.values[block_id, :, offset // pair, :, offset % pair] = v[position]
