"""Llama, and Mistral without its sliding window: the same computation under two names."""

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.batch import Batch
from common.engine.kv_cache import KVCache
from common.engine.layers import MLP, Attention, RMSNorm
from common.engine.model_config import ModelConfig
from common.engine.rope import cos_sin_table
from common.engine.weights import Weights
from kernels.dispatch import Ops


class Llama:
    """Token ids in, logits out. Owns the weights; the cache is a parameter."""

    def __init__(self, weights: Weights, config: ModelConfig, ops: Ops, max_model_len: int) -> None:
        """Takes every tensor out of weights.

        Raises: ModelError if one is missing, has another shape or is left over.
        """
        self._embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._cos_sin = cos_sin_table(config.rope, config.head_dim, max_model_len)
        self._layers = [
            DecoderLayer(weights, f"model.layers.{index}", config, ops) for index in range(config.num_layers)
        ]
        self._norm = RMSNorm(weights, "model.norm", config, ops)
        if config.tie_word_embeddings:
            self._head = ops.pack_linear(self._embedding)
        else:
            self._head = ops.pack_linear(weights.take("lm_head.weight", config.vocab_size, config.hidden_size))
        weights.finish(ignored=["lm_head.weight"] if config.tie_word_embeddings else [])

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Compute the batch and write its KV.

        Returns the logits of the sampled rows, [num_sampled, vocab_size] fp32.
        """
        x = F.embedding(batch.input_ids, self._embedding)
        residual: Tensor | None = None
        for index, layer in enumerate(self._layers):
            x, residual = layer(x, residual, batch, kv_cache.layer(index), self._cos_sin)
        assert residual is not None, "a model has layers"
        rows = batch.sampled_rows
        if len(rows) == 0:
            return torch.empty(0, self._embedding.shape[0])
        x, _ = self._norm(x[rows], residual[rows])
        return self._head(x).float()


class DecoderLayer:
    """Attention and MLP, each behind a norm; the sum of all of them so far travels as the residual."""

    def __init__(self, weights: Weights, name: str, config: ModelConfig, ops: Ops) -> None:
        self._attention_norm = RMSNorm(weights, f"{name}.input_layernorm", config, ops)
        self._attention = Attention(weights, f"{name}.self_attn", config, ops)
        self._mlp_norm = RMSNorm(weights, f"{name}.post_attention_layernorm", config, ops)
        self._mlp = MLP(weights, f"{name}.mlp", config, ops)

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: Batch, kv_cache: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x, residual: [num_tokens, hidden_size]; residual is None in the first layer. Returns both anew."""
        x, residual = self._attention_norm(x, residual)
        x = self._attention(x, batch, kv_cache, cos_sin)
        x, residual = self._mlp_norm(x, residual)
        return self._mlp(x), residual
