"""What the engine must know of a model's architecture, checked once, from Hugging Face's config names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from common.engine.rope import ROPE_TYPES, Rope
from common.errors import ModelError
from common.model_files import ModelFiles, read_architecture, read_sliding_window

Size = Annotated[int, msgspec.Meta(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """attention_bias: of the q, k, v and output projections; mlp_bias: of gate, up and down.

    sliding_window:  tokens that attention looks back at most; None is all of them
    """

    architecture: str
    hidden_size: Size
    intermediate_size: Size
    num_layers: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    vocab_size: Size
    max_position_embeddings: Size
    rms_norm_eps: float
    rope: Rope
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    sliding_window: Size | None

    @property
    def max_context(self) -> int:
        """Tokens up to which full attention is what the model means."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)


def read_model_config(files: ModelFiles) -> ModelConfig:
    """Check that the model is one that we can run.

    Raises: ModelError naming what is not supported, or the key that is missing or wrong.
    """
    try:
        return _read(files.config)
    except ModelError as error:
        raise ModelError(f"model {files.name} ({files.path}): {error}") from error


def _read(config: Mapping[str, Any]) -> ModelConfig:
    architecture = read_architecture(config)
    _refuse_variants(config)
    num_heads = config.get("num_attention_heads")
    # Mistral's attention and MLP have no biases, whatever its config says.
    has_biases = architecture == "LlamaForCausalLM"
    fields = {
        "architecture": architecture,
        "hidden_size": config.get("hidden_size"),
        "intermediate_size": config.get("intermediate_size"),
        "num_layers": config.get("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": _read_head_dim(config),
        "vocab_size": config.get("vocab_size"),
        "max_position_embeddings": config.get("max_position_embeddings"),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope": _read_rope(config),
        "attention_bias": has_biases and config.get("attention_bias", False),
        "mlp_bias": has_biases and config.get("mlp_bias", False),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "sliding_window": read_sliding_window(config),
    }
    model = _convert(fields, ModelConfig, "config")
    if model.num_heads % model.num_kv_heads != 0:
        raise ModelError(
            f"num_attention_heads must be a multiple of num_key_value_heads,"
            f" got {model.num_heads} and {model.num_kv_heads}"
        )
    return model


def _refuse_variants(config: Mapping[str, Any]) -> None:
    """Refuse what would load and then compute something else."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act must be silu, got {activation}")
    if quantization := config.get("quantization_config"):
        raise ModelError(f"quantization_config is not supported with safetensors, got {quantization}")


def _read_head_dim(config: Mapping[str, Any]) -> int:
    head_dim = config.get("head_dim")
    if head_dim is None:
        sizes = _convert([config.get("hidden_size"), config.get("num_attention_heads")], list[Size], "hidden_size")
        head_dim = sizes[0] // sizes[1]
    if not isinstance(head_dim, int) or head_dim % 2 != 0:
        raise ModelError(f"head_dim must be even, got {head_dim!r}")
    return head_dim


def _read_rope(config: Mapping[str, Any]) -> Rope:
    """transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling (with type for rope_type)."""
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= _convert(config.get("rope_parameters") or config.get("rope_scaling") or {}, dict[str, Any], "rope")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {rope_type}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or rope.get("mscale") or rope.get("mscale_all_dim"):
        raise ModelError(f"rope with partial_rotary_factor, mscale or mscale_all_dim is not supported, got {rope}")
    given = {key: value for key, value in rope.items() if value is not None}
    given.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return _convert(given | {"rope_type": rope_type}, Rope, "rope_parameters")


def _convert(value: Any, kind: Any, what: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"{what} is not usable: {error}") from error
