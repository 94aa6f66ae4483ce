"""Says what a GGUF file's metadata means, by the names of Hugging Face's config.json. Free of torch.

Source of the keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from typing import Any

from common.errors import ModelError
from common.gguf_file import GGUFFile

_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
"""llama.cpp's name -> Hugging Face's. Mistral is a "llama" too."""

_ROPE_FACTORS = "rope_freqs.weight"
_F32 = 0


def gguf_to_config(gguf: GGUFFile) -> dict[str, Any]:
    """Derive the config.

    Raises: ModelError if the architecture is another one, a key that every model has is missing or wrong,
    or the model is split over several files.
    """
    metadata = gguf.metadata
    if metadata.get("split.count", 1) > 1:
        raise ModelError(f"{gguf.path}: split GGUF files are not supported, got one of {metadata['split.count']}")
    arch = _get(gguf, "general.architecture")
    if arch not in list(_ARCHITECTURES):
        raise ModelError(f"{gguf.path}: architecture must be one of {', '.join(_ARCHITECTURES)}, got {arch!r}")
    hidden_size = _get_count(gguf, f"{arch}.embedding_length")
    num_heads = _get_count(gguf, f"{arch}.attention.head_count")
    head_dim = metadata.get(f"{arch}.attention.key_length", hidden_size // num_heads)
    return {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden_size,
        "intermediate_size": _get_count(gguf, f"{arch}.feed_forward_length"),
        "num_hidden_layers": _get_count(gguf, f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": _get(gguf, f"{arch}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _get_count(gguf, f"{arch}.context_length"),
        "vocab_size": _vocab_size(gguf),
        "rope_parameters": _rope_parameters(gguf, arch, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in gguf.tensors,
        "hidden_act": "silu",
        "sliding_window": metadata.get(f"{arch}.attention.sliding_window"),
    }


def gguf_to_eos_token_ids(gguf: GGUFFile) -> tuple[int, ...]:
    """End of text, and end of turn and of message where the model has them."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return tuple(dict.fromkeys(gguf.metadata[key] for key in keys if key in gguf.metadata))


def _get(gguf: GGUFFile, key: str) -> Any:
    if key not in gguf.metadata:
        raise ModelError(f"{gguf.path}: the metadata key {key} is missing")
    return gguf.metadata[key]


def _get_count(gguf: GGUFFile, key: str) -> int:
    value = _get(gguf, key)
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"{gguf.path}: {key} must be a positive integer, got {value!r}")
    return value


def _vocab_size(gguf: GGUFFile) -> int:
    """The embedding's rows count: the vocabulary may be shorter, and the vocab_size key is optional."""
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{gguf.path}: tensor token_embd.weight must be a matrix, got {embedding}")
    return embedding.shape[0]


def _rope_parameters(gguf: GGUFFile, arch: str, head_dim: int) -> dict[str, Any]:
    metadata = gguf.metadata
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.get(f"{arch}.rope.freq_base", 10000.0)}
    num_rotated = metadata.get(f"{arch}.rope.dimension_count", head_dim)
    if num_rotated != head_dim:
        raise ModelError(f"{gguf.path}: {arch}.rope.dimension_count must be the head's {head_dim}, got {num_rotated}")
    if _ROPE_FACTORS in gguf.tensors:
        return rope | {"rope_type": "factors", "factors": _read_rope_factors(gguf)}
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": _get(gguf, f"{arch}.rope.scaling.factor")}
    if original := metadata.get(f"{arch}.rope.scaling.original_context_length"):
        rope["original_max_position_embeddings"] = original
    return rope


def _read_rope_factors(gguf: GGUFFile) -> list[float]:
    """What each inverse frequency is divided by: llama.cpp stores llama3 scaling as such a tensor."""
    tensor = gguf.tensors[_ROPE_FACTORS]
    if tensor.type_id != _F32:
        raise ModelError(f"{gguf.path}: tensor {tensor.name} must be F32 (0), got type {tensor.type_id}")
    values = struct.Struct(f"<{tensor.num_elements}f")
    with gguf.path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(values.size)
    if len(data) != values.size:
        raise ModelError(f"{gguf.path}: tensor {tensor.name} must have {values.size} bytes, got {len(data)}")
    return list(values.unpack(data))
