"""Small random models, built by transformers, which is also what ours is compared with."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

PROMPT_LENS = (1, 17, 45)

_SIZES = {
    "vocab_size": 257,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}

LLAMAS = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "multi_head": {"num_key_value_heads": 6},
    "multi_query": {"num_key_value_heads": 1},
    "one_kv_head": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16},
    "wide_heads": {"head_dim": 20},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    "llama3_rope": {"rope_parameters": _LLAMA3},
    "yarn_rope": {"rope_parameters": _YARN},
}
VARIANTS = (*LLAMAS, "mistral")


def build(variant: str) -> PreTrainedModel:
    """A model of random weights, biases and norms included, the same every time."""
    torch.manual_seed(1)
    if variant == "mistral":
        model = MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=None, head_dim=16))
    else:
        model = LlamaForCausalLM(LlamaConfig(**_SIZES | LLAMAS[variant]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def save(variant: str, folder: Path, max_shard_size: str = "1GB") -> PreTrainedModel:
    model = build(variant)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, 257, (length,), generator=generator).tolist() for length in PROMPT_LENS]


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Without a cache: every token from a forward pass over all before it."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]
