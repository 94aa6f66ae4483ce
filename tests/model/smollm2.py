"""The built-in model as transformers has it."""

from collections.abc import Iterator, Mapping
from functools import cache

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from common.model_files import find_model

CONFIG = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
}


class _Names(LlamaForCausalLM):
    """What transformers asks for the names of tensors. It would ask each module again, for names that it has."""

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return iter(())


@cache
def reference_tensors() -> Mapping[str, Tensor]:
    """As transformers reads and names them, which takes it many seconds."""
    with torch.device("meta"):
        names = _Names(LlamaConfig(**CONFIG))
    return load_gguf_checkpoint(str(find_model("").path), return_tensors=True, model_to_load=names)["tensors"]


@cache
def reference() -> LlamaForCausalLM:
    """In fp32."""
    config = LlamaConfig(**CONFIG)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(reference_tensors(), strict=False, assign=True)
    model.tie_weights()
    # Its frequencies are no weights, so they are still on the meta device.
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()
