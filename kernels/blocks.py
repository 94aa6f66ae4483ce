"""Embedding, the two halves of a decoder layer, all layers in a row, and the head: the contracts of what a model calls.

Behind each half lies exactly the place where the ranks of a group, which have a part of every block, add up what they
computed, so nothing finer is ever called by a model, and what runs all blocks in a row does that too. A bias on the
linear at a block's end belongs to one rank. kernels/composed.py puts blocks together from small ops; a device may run a
whole block, or all of them, as it likes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.paged_kv import LayerKV
from kernels.token_rows import TokenRows


@dataclass(frozen=True, slots=True)
class NormWeight:
    """weight: [hidden_size]."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """weight: [out, in];  bias: [out] or None, in the weight's dtype. A block may keep a packed copy instead."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Grouped-query attention with rotary positions, behind its norm.

    qkv:      queries, keys and values side by side
    cos_sin:  [max_positions, head_dim] fp32; see rope_and_cache
    """

    norm: NormWeight
    qkv: LinearWeight
    out: LinearWeight
    cos_sin: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True, slots=True)
class MLPWeights:
    """An MLP gated by SiLU, behind its norm. gate_up: gate and up side by side."""

    norm: NormWeight
    gate_up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A decoder layer."""

    attention: AttentionWeights
    mlp: MLPWeights


class Embedding(Protocol):
    """Hidden states of tokens before the first layer."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids: [num_tokens] int64. Returns [num_tokens, hidden_size], in the weights' dtype or fp32."""
        ...


class AttentionBlock(Protocol):
    """x is what the block before it computed; the sum of all blocks so far travels as the residual."""

    def __call__(self, x: Tensor, residual: Tensor | None, rows: TokenRows, kv: LayerKV) -> tuple[Tensor, Tensor]:
        """x, residual: [num_tokens, hidden_size]; residual is None before the first block. May be overwritten.

        Writes the rows' keys and values into the cache. Returns (this block's output, the new residual).
        """
        ...


class MLPBlock(Protocol):
    """The same without a cache."""

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...


class Decoder(Protocol):
    """The blocks of all layers, one after the other."""

    def __call__(self, x: Tensor, rows: TokenRows, layers: Sequence[LayerKV]) -> tuple[Tensor, Tensor]:
        """x: embeddings, [num_tokens, hidden_size], may be overwritten;  layers: the cache of each, always the same.

        Returns (the last block's output, the residual), the same at all ranks of a group.
        Raises: GroupBroken.
        """
        ...


class Head(Protocol):
    """The last norm and the logits."""

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual: [num_rows, hidden_size], may be overwritten. Returns [num_rows, vocab_size] fp32."""
        ...
