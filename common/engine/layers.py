"""The layers that decoder models share: their tensors' names and sizes, as the ops that compute them want them."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from common.engine.model_config import ModelConfig
from common.engine.weights import Part, Weights
from kernels.blocks import AttentionWeights, Embedding, Head, LinearWeight, MLPWeights, NormWeight
from kernels.dispatch import Ops
from kernels.group import Group
from kernels.vocab_parallel import VocabParallelEmbedding, VocabParallelHead


def load_norm(weights: Weights, name: str, config: ModelConfig) -> NormWeight:
    return NormWeight(weights.take(f"{name}.weight", config.hidden_size), config.rms_norm_eps)


def load_ends(weights: Weights, config: ModelConfig, ops: Ops, group: Group | None) -> tuple[Embedding, Head]:
    """What is before the first layer and behind the last, of all ranks together."""
    embedding, head = _load_own_ends(weights, config, ops)
    if group is None:
        return embedding, head
    shard = weights.shard
    return VocabParallelEmbedding(embedding, shard.vocab, group), VocabParallelHead(head, shard.vocab_sizes, group)


def _load_own_ends(weights: Weights, config: ModelConfig, ops: Ops) -> tuple[Embedding, Head]:
    shape, rows = (config.vocab_size, config.hidden_size), weights.shard.vocab
    linear_dtype = ops.linear_dtype(weights.dtype)
    norm = load_norm(weights, "model.norm", config)
    if config.tie_word_embeddings:
        return ops.tied(norm, weights.take("model.embed_tokens.weight", *shape, dtype=linear_dtype, rows=rows))
    embedding = ops.embedding(weights.take("model.embed_tokens.weight", *shape, rows=rows))
    head = LinearWeight(weights.take("lm_head.weight", *shape, dtype=linear_dtype, rows=rows))
    return embedding, ops.head(norm, head)


def load_column_parallel(
    weights: Weights, ops: Ops, parts: Sequence[Part], in_size: int, *, has_bias: bool
) -> LinearWeight:
    """Merge linears that have the same input into one, whose output is theirs side by side. parts: our outputs."""
    suffixed = [[replace(part, name=f"{part.name}.{kind}") for part in parts] for kind in ("weight", "bias")]
    weight = weights.take_merged(suffixed[0], in_size, dtype=ops.linear_dtype(weights.dtype))
    return LinearWeight(weight, weights.take_merged(suffixed[1]) if has_bias else None)


def load_row_parallel(
    weights: Weights, ops: Ops, name: str, shape: tuple[int, int], inputs: range, *, has_bias: bool
) -> LinearWeight:
    """A linear of which we have some inputs: its output is to be added up over all ranks, and the bias once."""
    weight = weights.take(f"{name}.weight", *shape, dtype=ops.linear_dtype(weights.dtype), columns=inputs)
    if has_bias and weights.shard.adds_bias:
        return LinearWeight(weight, weights.take(f"{name}.bias", shape[0]))
    if has_bias:
        weights.skip(f"{name}.bias", shape[0])
    return LinearWeight(weight)


def load_attention(
    weights: Weights, norm_name: str, name: str, config: ModelConfig, ops: Ops, cos_sin: Tensor
) -> AttentionWeights:
    """cos_sin: [max_positions, head_dim], shared by all layers."""
    shard, hidden_size, has_bias = weights.shard, config.hidden_size, config.attention_bias
    heads = {"q": (config.num_heads, shard.heads), "k": (config.num_kv_heads, shard.kv_heads)}
    heads["v"] = heads["k"]
    parts = [
        Part(f"{name}.{letter}_proj", num_heads * config.head_dim, _rows_of(ours, config.head_dim))
        for letter, (num_heads, ours) in heads.items()
    ]
    out_shape = hidden_size, config.num_heads * config.head_dim
    inputs = _rows_of(shard.heads, config.head_dim)
    return AttentionWeights(
        norm=load_norm(weights, norm_name, config),
        qkv=load_column_parallel(weights, ops, parts, hidden_size, has_bias=has_bias),
        out=load_row_parallel(weights, ops, f"{name}.o_proj", out_shape, inputs, has_bias=has_bias),
        cos_sin=cos_sin,
        num_heads=len(shard.heads),
        num_kv_heads=len(shard.kv_heads),
        head_dim=config.head_dim,
    )


def _rows_of(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def load_mlp(weights: Weights, norm_name: str, name: str, config: ModelConfig, ops: Ops) -> MLPWeights:
    size, hidden_size, has_bias = config.intermediate_size, config.hidden_size, config.mlp_bias
    columns = weights.shard.mlp
    gate_up = [Part(f"{name}.{part}_proj", size, columns) for part in ("gate", "up")]
    return MLPWeights(
        norm=load_norm(weights, norm_name, config),
        gate_up=load_column_parallel(weights, ops, gate_up, hidden_size, has_bias=has_bias),
        down=load_row_parallel(weights, ops, f"{name}.down_proj", (hidden_size, size), columns, has_bias=has_bias),
    )
