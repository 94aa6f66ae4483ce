"""Embedding, the two halves of a decoder layer, all layers in a row, and the head: contracts and references.

Behind each half lies exactly the place where the ranks of a group, which have a part of every block, add up what they
computed, so nothing finer is ever called by a model, and what runs all blocks in a row does that too. A bias on the
linear at a block's end belongs to one rank. The reference is put together from the
small ops; a device may run a whole block, or all of them, as it likes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.decode_attention import decode_attention
from kernels.group import Group
from kernels.linear import pack_linear
from kernels.paged_kv import LayerKV
from kernels.prefill_attention import prefill_attention
from kernels.rms_norm import rms_norm
from kernels.rope_and_cache import rope_and_cache
from kernels.silu_and_mul import silu_and_mul
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
        """token_ids: [num_tokens]. Returns [num_tokens, hidden_size] in the weights' dtype."""
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


class ReferenceEmbedding:
    """Written to be read. weight: [vocab_size, hidden_size]."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self._weight)


class ReferenceAttention:
    """Written to be read; tested against transformers, and what every other one is tested against."""

    def __init__(self, weights: AttentionWeights) -> None:
        self._norm = weights.norm
        self._qkv = pack_linear(weights.qkv.weight, weights.qkv.bias)
        self._out = pack_linear(weights.out.weight, weights.out.bias)
        self._cos_sin = weights.cos_sin
        self._head_dim = weights.head_dim
        self._num_heads = [weights.num_heads, weights.num_kv_heads, weights.num_kv_heads]
        self._scale = weights.scale

    def __call__(self, x: Tensor, residual: Tensor | None, rows: TokenRows, kv: LayerKV) -> tuple[Tensor, Tensor]:
        x, residual = rms_norm(x, self._norm.weight, self._norm.eps, residual)
        q, k, v = self._qkv(x).unflatten(1, (-1, self._head_dim)).split(self._num_heads, dim=1)
        q, _ = rope_and_cache(q, k, v, self._cos_sin, rows.positions, kv, rows.slot_mapping)
        return self._out(self._attend(q, rows, kv).flatten(1)), residual

    def _attend(self, q: Tensor, rows: TokenRows, kv: LayerKV) -> Tensor:
        parts: list[Tensor] = []
        if part := rows.decode:
            decode_q = q[: rows.num_decode_rows]
            parts.append(decode_attention(decode_q, kv, part.block_tables, part.context_lens, self._scale))
        if part := rows.prefill:
            prefill_q, tables = q[rows.num_decode_rows :], part.block_tables
            parts.append(
                prefill_attention(
                    prefill_q, kv, part.cu_seqlens, part.context_lens, tables, self._scale, part.max_seqlen
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class ReferenceMLP:
    """Written to be read."""

    def __init__(self, weights: MLPWeights) -> None:
        self._norm = weights.norm
        self._gate_up = pack_linear(weights.gate_up.weight, weights.gate_up.bias)
        self._down = pack_linear(weights.down.weight, weights.down.bias)

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = rms_norm(x, self._norm.weight, self._norm.eps, residual)
        return self._down(silu_and_mul(self._gate_up(x))), residual


class BlockDecoder:
    """Block after block; what ranks computed with their part of each is added up."""

    def __init__(self, blocks: Sequence[tuple[AttentionBlock, MLPBlock]], group: Group | None = None) -> None:
        """blocks: of every layer;  group: None where they are whole."""
        self._blocks = blocks
        self._group = group

    def __call__(self, x: Tensor, rows: TokenRows, layers: Sequence[LayerKV]) -> tuple[Tensor, Tensor]:
        residual: Tensor | None = None
        for (attention, mlp), kv in zip(self._blocks, layers, strict=True):
            x, residual = attention(x, residual, rows, kv)
            self._add_up(x)
            x, residual = mlp(x, residual)
            self._add_up(x)
        assert residual is not None, "a model has layers"
        return x, residual

    def _add_up(self, x: Tensor) -> None:
        if self._group is not None:
            self._group.all_reduce(x)


class ReferenceDecoder(BlockDecoder):
    """Written to be read."""

    def __init__(self, layers: Iterable[LayerWeights], group: Group | None = None) -> None:
        super().__init__([(ReferenceAttention(layer.attention), ReferenceMLP(layer.mlp)) for layer in layers], group)


class ReferenceHead:
    """Written to be read."""

    def __init__(self, norm: NormWeight, weight: LinearWeight) -> None:
        self._norm = norm
        self._linear = pack_linear(weight.weight, weight.bias)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        x, _ = rms_norm(x, self._norm.weight, self._norm.eps, residual)
        return self._linear(x).float()
