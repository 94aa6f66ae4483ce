"""A small random model with heads that GPUs' kernels take, made without transformers, which may be missing there."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.e2e.byte_tokenizer import save_byte_tokenizer

HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 128, 160, 3, 4, 2, 64, 257
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "eos_token_id": None,
}


def save_model(folder: Path) -> None:
    """With a tokenizer of one token a byte; the same every time."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(_tensors(torch.Generator().manual_seed(1)), folder / "model.safetensors", {"format": "pt"})
    save_byte_tokenizer(folder)


def _tensors(random: torch.Generator) -> dict[str, Tensor]:
    def linear(out_size: int, in_size: int) -> Tensor:
        return 0.3 * torch.randn(out_size, in_size, generator=random)

    def norm() -> Tensor:
        return 0.5 + torch.rand(HIDDEN, generator=random)

    tensors = {"model.embed_tokens.weight": linear(VOCAB, HIDDEN), "lm_head.weight": linear(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = norm()
    for index in range(LAYERS):
        layer = {
            "input_layernorm": norm(),
            "self_attn.q_proj": linear(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": linear(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": linear(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": linear(HIDDEN, HEADS * HEAD_DIM),
            "post_attention_layernorm": norm(),
            "mlp.gate_proj": linear(MLP, HIDDEN),
            "mlp.up_proj": linear(MLP, HIDDEN),
            "mlp.down_proj": linear(HIDDEN, MLP),
        }
        tensors |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in layer.items()}
    return tensors
