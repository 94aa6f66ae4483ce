"""The layers that decoder models share: their tensors' names and sizes, as the ops that compute them want them."""

from collections.abc import Sequence

from torch import Tensor

from common.engine.model_config import ModelConfig
from common.engine.weights import Weights
from kernels.blocks import AttentionWeights, LinearWeight, MLPWeights, NormWeight
from kernels.dispatch import Ops


def load_norm(weights: Weights, name: str, config: ModelConfig) -> NormWeight:
    return NormWeight(weights.take(f"{name}.weight", config.hidden_size), config.rms_norm_eps)


def load_linear(
    weights: Weights, ops: Ops, names: Sequence[str], out_sizes: Sequence[int], in_size: int, has_bias: bool
) -> LinearWeight:
    """Merge linears that have the same input into one, whose output is theirs side by side."""
    dtype = ops.linear_dtype(weights.dtype)
    weight = weights.take_merged([f"{name}.weight" for name in names], out_sizes, in_size, dtype=dtype)
    return LinearWeight(
        weight, weights.take_merged([f"{name}.bias" for name in names], out_sizes) if has_bias else None
    )


def load_attention(
    weights: Weights, norm_name: str, name: str, config: ModelConfig, ops: Ops, cos_sin: Tensor
) -> AttentionWeights:
    """cos_sin: [max_positions, head_dim], shared by all layers."""
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    names, sizes = [f"{name}.{part}_proj" for part in "qkv"], [q_size, kv_size, kv_size]
    has_bias = config.attention_bias
    return AttentionWeights(
        norm=load_norm(weights, norm_name, config),
        qkv=load_linear(weights, ops, names, sizes, config.hidden_size, has_bias),
        out=load_linear(weights, ops, [f"{name}.o_proj"], [config.hidden_size], q_size, has_bias),
        cos_sin=cos_sin,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def load_mlp(weights: Weights, norm_name: str, name: str, config: ModelConfig, ops: Ops) -> MLPWeights:
    size, hidden_size, has_bias = config.intermediate_size, config.hidden_size, config.mlp_bias
    gate_up = [f"{name}.gate_proj", f"{name}.up_proj"]
    return MLPWeights(
        norm=load_norm(weights, norm_name, config),
        gate_up=load_linear(weights, ops, gate_up, [size, size], hidden_size, has_bias),
        down=load_linear(weights, ops, [f"{name}.down_proj"], [hidden_size], size, has_bias),
    )
