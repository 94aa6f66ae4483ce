"""Blocks put together from small ops, one call after the other: by the reference ops, and by those of a GPU."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.argmax import argmax
from kernels.blocks import (
    AttentionBlock,
    AttentionWeights,
    LayerWeights,
    LinearWeight,
    MLPBlock,
    MLPWeights,
    NormWeight,
)
from kernels.decode_attention import decode_attention
from kernels.group import Group
from kernels.linear import PackedLinear, pack_linear
from kernels.paged_kv import LayerKV
from kernels.prefill_attention import prefill_attention
from kernels.rms_norm import rms_norm
from kernels.rope_and_cache import rope_and_cache
from kernels.sample import Draws, sample
from kernels.silu_and_mul import silu_and_mul
from kernels.staging import gather_blocks, scatter_blocks
from kernels.token_rows import TokenRows


@dataclass(frozen=True, slots=True)
class SmallOps:
    """The ops of a device. Each has the contract of the kernels' file of its name; the defaults are the references.

    pack, pack_head: of linears, in kernels/linear.py, and of the one that computes logits
    """

    rms_norm: Callable[[Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor]] = rms_norm
    rope_and_cache: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, LayerKV, Tensor], tuple[Tensor, Tensor]] = (
        rope_and_cache
    )
    decode_attention: Callable[[Tensor, LayerKV, Tensor, Tensor, float], Tensor] = decode_attention
    prefill_attention: Callable[[Tensor, LayerKV, Tensor, Tensor, Tensor, float, int], Tensor] = prefill_attention
    silu_and_mul: Callable[[Tensor], Tensor] = silu_and_mul
    pack: Callable[[Tensor, Tensor | None], PackedLinear] = pack_linear
    pack_head: Callable[[Tensor, Tensor | None], PackedLinear] = pack_linear
    argmax: Callable[[Tensor], tuple[Tensor, Tensor]] = argmax
    sample: Callable[[Tensor, Draws], Tensor] = sample
    gather_blocks: Callable[[Tensor, Tensor, int, Tensor], None] = gather_blocks
    scatter_blocks: Callable[[Tensor, Tensor, Tensor, int], None] = scatter_blocks


REFERENCE = SmallOps()
"""Plain PyTorch, on every device: written to be read, and what every other one is tested against."""


class ComposedEmbedding:
    """weight: [vocab_size, hidden_size]."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self._weight)


class ComposedAttention:
    """With the reference ops it is tested against transformers."""

    def __init__(self, weights: AttentionWeights, ops: SmallOps = REFERENCE) -> None:
        self._ops = ops
        self._norm = weights.norm
        self._qkv = ops.pack(weights.qkv.weight, weights.qkv.bias)
        self._out = ops.pack(weights.out.weight, weights.out.bias)
        self._cos_sin = weights.cos_sin
        self._head_dim = weights.head_dim
        self._num_heads = [weights.num_heads, weights.num_kv_heads, weights.num_kv_heads]
        self._scale = weights.scale

    def __call__(self, x: Tensor, residual: Tensor | None, rows: TokenRows, kv: LayerKV) -> tuple[Tensor, Tensor]:
        x, residual = self._ops.rms_norm(x, self._norm.weight, self._norm.eps, residual)
        q, k, v = self._qkv(x).unflatten(1, (-1, self._head_dim)).split(self._num_heads, dim=1)
        q, _ = self._ops.rope_and_cache(q, k, v, self._cos_sin, rows.positions, kv, rows.slot_mapping)
        return self._out(self._attend(q, rows, kv).flatten(1)), residual

    def _attend(self, q: Tensor, rows: TokenRows, kv: LayerKV) -> Tensor:
        parts: list[Tensor] = []
        if part := rows.decode:
            decode_q = q[: rows.num_decode_rows]
            parts.append(self._ops.decode_attention(decode_q, kv, part.block_tables, part.context_lens, self._scale))
        if part := rows.prefill:
            prefill_q, tables = q[rows.num_decode_rows :], part.block_tables
            parts.append(
                self._ops.prefill_attention(
                    prefill_q, kv, part.cu_seqlens, part.context_lens, tables, self._scale, part.max_seqlen
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class ComposedMLP:
    """Norm, gate and up in one linear, activation, down."""

    def __init__(self, weights: MLPWeights, ops: SmallOps = REFERENCE) -> None:
        self._ops = ops
        self._norm = weights.norm
        self._gate_up = ops.pack(weights.gate_up.weight, weights.gate_up.bias)
        self._down = ops.pack(weights.down.weight, weights.down.bias)

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self._ops.rms_norm(x, self._norm.weight, self._norm.eps, residual)
        return self._down(self._ops.silu_and_mul(self._gate_up(x))), residual


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


class ComposedHead:
    """The last norm and a linear."""

    def __init__(self, norm: NormWeight, weight: LinearWeight, ops: SmallOps = REFERENCE) -> None:
        self._ops = ops
        self._norm = norm
        self._linear = ops.pack_head(weight.weight, weight.bias)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        x, _ = self._ops.rms_norm(x, self._norm.weight, self._norm.eps, residual)
        return self._linear(x).float()


class ComposedOps:
    """What a model asks of its ops (kernels/dispatch.py), by small ones that hold nothing between steps."""

    def __init__(self, name: str = "reference", small: SmallOps = REFERENCE, group: Group | None = None) -> None:
        """group: see choose_ops."""
        self.name = name
        self.small = small
        self._group = group

    def embedding(self, weight: Tensor) -> ComposedEmbedding:
        return ComposedEmbedding(weight)

    def attention(self, weights: AttentionWeights) -> ComposedAttention:
        return ComposedAttention(weights, self.small)

    def mlp(self, weights: MLPWeights) -> ComposedMLP:
        return ComposedMLP(weights, self.small)

    def decoder(self, layers: Iterable[LayerWeights]) -> BlockDecoder:
        return BlockDecoder([(self.attention(layer.attention), self.mlp(layer.mlp)) for layer in layers], self._group)

    def head(self, norm: NormWeight, weight: LinearWeight) -> ComposedHead:
        return ComposedHead(norm, weight, self.small)

    def tied(self, norm: NormWeight, weight: Tensor) -> tuple[ComposedEmbedding, ComposedHead]:
        return ComposedEmbedding(weight), ComposedHead(norm, LinearWeight(weight), self.small)

    def linear_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def hidden_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self.small.argmax(logits)

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        return self.small.sample(logits, draws)

    def gather_blocks(self, blocks: Tensor, block_ids: Tensor, first_head: int, staging: Tensor) -> None:
        self.small.gather_blocks(blocks, block_ids, first_head, staging)

    def scatter_blocks(self, staging: Tensor, blocks: Tensor, block_ids: Tensor, first_head: int) -> None:
        self.small.scatter_blocks(staging, blocks, block_ids, first_head)

    def allow_binding(self) -> None:
        pass

    def claim_cores(self) -> None:
        pass

    def begin_step(self) -> None:
        pass

    def rest(self) -> None:
        pass

    @property
    def num_helped(self) -> int:
        return 0

    def others_want_cores(self) -> bool:
        return False
