"""Llama, and Mistral without its sliding window: the same computation under two names."""

import torch
from torch import Tensor

from common.engine.batch import Batch
from common.engine.kv_cache import PagedCache
from common.engine.layers import load_attention, load_ends, load_mlp
from common.engine.model_config import ModelConfig
from common.engine.rope import cos_sin_table
from common.engine.weights import Weights
from kernels.blocks import LayerWeights
from kernels.dispatch import Ops
from kernels.group import Group


class Llama:
    """Token ids in, logits out. Owns the weights; the cache is a parameter."""

    def __init__(
        self, weights: Weights, config: ModelConfig, ops: Ops, max_model_len: int, group: Group | None = None
    ) -> None:
        """Takes every tensor out of weights.

        group: of the ranks that have a shard of the model each; None: the weights are all of it

        Raises: ModelError if one is missing, has another shape or is left over.
        """
        self._ops = ops
        self._vocab_size = config.vocab_size
        self._hidden_dtype = ops.hidden_dtype(weights.dtype)
        self._embedding, self._head = load_ends(weights, config, ops, group)
        cos_sin = cos_sin_table(config.rope, config.head_dim, max_model_len).to(weights.device)
        names = (f"model.layers.{index}" for index in range(config.num_layers))
        # One after the other: what the ops pack is not kept in two forms for the whole model.
        self._decoder = ops.decoder(load_layer(weights, name, config, ops, cos_sin) for name in names)
        weights.finish(ignored=["lm_head.weight"] if config.tie_word_embeddings else [])

    def forward(self, batch: Batch, kv_cache: PagedCache) -> Tensor:
        """Compute the batch and write its KV.

        Returns the logits of the sampled rows, [num_sampled, vocab_size] fp32; of none at ranks other than rank 0.
        """
        x, residual = self.decode(self.embed(batch), batch, kv_cache)
        return self.logits(x, residual, batch)

    def embed(self, batch: Batch) -> Tensor:
        """The first of three parts of `forward`, for whoever looks at them one by one."""
        self._ops.begin_step()
        return self._embedding(batch.input_ids).to(self._hidden_dtype)

    def decode(self, x: Tensor, batch: Batch, kv_cache: PagedCache) -> tuple[Tensor, Tensor]:
        """The second: all layers."""
        return self._decoder(x, batch.rows, kv_cache.layers)

    def logits(self, x: Tensor, residual: Tensor, batch: Batch) -> Tensor:
        """The third."""
        rows = batch.sampled_rows
        if len(rows) == 0:
            return x.new_empty(0, self._vocab_size, dtype=torch.float32)
        if len(rows) < len(x):
            x, residual = x[rows], residual[rows]
        return self._head(x, residual)


def load_layer(weights: Weights, name: str, config: ModelConfig, ops: Ops, cos_sin: Tensor) -> LayerWeights:
    norms = f"{name}.input_layernorm", f"{name}.post_attention_layernorm"
    return LayerWeights(
        load_attention(weights, norms[0], f"{name}.self_attn", config, ops, cos_sin),
        load_mlp(weights, norms[1], f"{name}.mlp", config, ops),
    )
