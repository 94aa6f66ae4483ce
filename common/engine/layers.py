"""The layers that decoder models share. Built complete from weights; they own packed weights and nothing else."""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.engine.batch import Batch
from common.engine.model_config import ModelConfig
from common.engine.weights import Weights
from kernels.dispatch import Ops
from kernels.linear import PackedLinear


def load_linear(
    weights: Weights, ops: Ops, names: Sequence[str], out_sizes: Sequence[int], in_size: int, has_bias: bool
) -> PackedLinear:
    """Merge linears that have the same input into one, whose output is theirs side by side."""
    weight = weights.take_merged([f"{name}.weight" for name in names], out_sizes, in_size)
    bias = weights.take_merged([f"{name}.bias" for name in names], out_sizes) if has_bias else None
    return ops.pack_linear(weight, bias)


class RMSNorm:
    """Adds the residual, then normalises."""

    def __init__(self, weights: Weights, name: str, config: ModelConfig, ops: Ops) -> None:
        self._weight = weights.take(f"{name}.weight", config.hidden_size)
        self._eps = config.rms_norm_eps
        self._ops = ops

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, residual: [num_tokens, hidden_size]. Returns (normalised, the new residual)."""
        return self._ops.rms_norm(x, self._weight, self._eps, residual)


class Attention:
    """Grouped-query attention with rotary positions over the paged cache."""

    def __init__(self, weights: Weights, name: str, config: ModelConfig, ops: Ops) -> None:
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        names = [f"{name}.{part}_proj" for part in "qkv"]
        self._sizes = [q_size, kv_size, kv_size]
        self._qkv = load_linear(weights, ops, names, self._sizes, config.hidden_size, config.attention_bias)
        self._out = load_linear(weights, ops, [f"{name}.o_proj"], [config.hidden_size], q_size, config.attention_bias)
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self._ops = ops

    def __call__(self, x: Tensor, batch: Batch, kv_cache: Tensor, cos_sin: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size];  kv_cache: this layer's view, whose slots of the batch are written."""
        heads = (part.unflatten(1, (-1, self._head_dim)) for part in self._qkv(x).split(self._sizes, dim=1))
        q, k, v = heads
        q, _ = self._ops.rope_and_cache(q, k, v, cos_sin, batch.positions, kv_cache, batch.slot_mapping)
        return self._out(self._attend(q, batch, kv_cache).flatten(1))

    def _attend(self, q: Tensor, batch: Batch, kv_cache: Tensor) -> Tensor:
        parts: list[Tensor] = []
        if rows := batch.decode:
            decode_q = q[: batch.num_decode_rows]
            parts.append(
                self._ops.decode_attention(decode_q, kv_cache, rows.block_tables, rows.context_lens, self._scale)
            )
        if rows := batch.prefill:
            prefill_q = q[batch.num_decode_rows :]
            parts.append(
                self._ops.prefill_attention(
                    prefill_q,
                    kv_cache,
                    rows.cu_seqlens,
                    rows.context_lens,
                    rows.block_tables,
                    self._scale,
                    rows.max_seqlen,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class MLP:
    """Gated by SiLU."""

    def __init__(self, weights: Weights, name: str, config: ModelConfig, ops: Ops) -> None:
        size, hidden_size, has_bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        self._gate_up = load_linear(weights, ops, names, [size, size], hidden_size, has_bias)
        self._down = load_linear(weights, ops, [f"{name}.down_proj"], [hidden_size], size, has_bias)
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size]."""
        return self._down(self._ops.silu_and_mul(self._gate_up(x)))
