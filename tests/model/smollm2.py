"""The built-in model as transformers has it."""

from collections.abc import Mapping

import torch
from torch import Tensor
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


def load_reference_tensors() -> Mapping[str, Tensor]:
    """As transformers reads and names them."""
    with torch.device("meta"):
        names = LlamaForCausalLM(LlamaConfig(**CONFIG))
    return load_gguf_checkpoint(str(find_model("").path), return_tensors=True, model_to_load=names)["tensors"]


def build_reference(tensors: Mapping[str, Tensor]) -> LlamaForCausalLM:
    """In fp32."""
    config = LlamaConfig(**CONFIG)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    # Its frequencies are no weights, so they are still on the meta device.
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()
