"""What a config.json means to the engine, and what is refused because it would compute something else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.model_config import ModelConfig, read_model_config
from common.engine.rope import DefaultRope, FactorsRope, LinearRope, Llama3Rope, YarnRope, cos_sin_table
from common.errors import ModelError
from common.model_files import ModelFiles

LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
LLAMA3_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(config: Mapping[str, Any]) -> ModelConfig:
    files = ModelFiles(
        path=Path("/models/tiny"),
        name="tiny",
        format="safetensors",
        weight_files=(),
        config=config,
        model_hash="",
        vocab_size=100,
        max_context=512,
        eos_token_ids=(),
    )
    return read_model_config(files)


def test_absent_keys_have_transformers_defaults() -> None:
    config = read(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (6, 8, 1e-6)
    assert (config.attention_bias, config.mlp_bias, config.tie_word_embeddings) == (False, False, False)
    assert config.rope == DefaultRope(rope_theta=10000.0)
    assert config.max_context == 512


def test_a_null_is_as_if_absent() -> None:
    nulls = dict.fromkeys(["num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters", "sliding_window"])
    assert read({**LLAMA, **nulls}) == read(LLAMA)


def test_heads_may_have_a_size_of_their_own() -> None:
    assert read({**LLAMA, "head_dim": 20}).head_dim == 20


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
        {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_theta": 5000, "rope_scaling": {"type": "linear", "factor": 4}},
    ],
)
def test_rope_is_read_as_every_version_of_transformers_writes_it(spelling: dict[str, Any]) -> None:
    assert read({**LLAMA, **spelling}).rope == LinearRope(rope_theta=5000.0, factor=4.0)


def test_the_original_context_is_the_models_unless_it_is_stated() -> None:
    scaling = {"rope_type": "llama3", **LLAMA3_SCALING}
    rope = read({**LLAMA, "rope_scaling": scaling}).rope
    assert rope == Llama3Rope(**LLAMA3_SCALING, original_max_position_embeddings=512)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": None}
    assert read({**LLAMA, "rope_scaling": yarn}).rope == YarnRope(factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "su", "mrope"])
def test_other_rope_scalings_are_refused_by_name(rope_type: str) -> None:
    with pytest.raises(ModelError, match=rf"rope_type must be one of default, linear, llama3.*, got {rope_type}"):
        read({**LLAMA, "rope_scaling": {"rope_type": rope_type, "factor": 2.0}})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "LlamaForCausalLM, MistralForCausalLM, got Qwen2ForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is not supported.*awq"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "a multiple of num_key_value_heads, got 6 and 4"),
        ({"head_dim": 9}, "head_dim must be even, got 9"),
        ({"head_dim": "wide"}, "head_dim must be even, got 'wide'"),
        ({"head_dim": 0}, "config is not usable.*head_dim"),
        ({"num_attention_heads": 0}, "hidden_size is not usable"),
        ({"intermediate_size": None}, "config is not usable.*intermediate_size"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_parameters is not usable.*factor"),
        ({"rope_scaling": "linear"}, "rope is not usable"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "mscale"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=f"model tiny .*{named}"):
        read({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("window", "max_context"), [({"sliding_window": None}, 8192), ({"sliding_window": 9000}, 8192), ({}, 4096)]
)
def test_a_mistral_runs_up_to_its_sliding_window(window: dict[str, int | None], max_context: int) -> None:
    assert read({**MISTRAL, "max_position_embeddings": 8192, **window}).max_context == max_context


def test_a_mistral_has_no_biases_whatever_its_config_says() -> None:
    config = read({**MISTRAL, "attention_bias": True, "mlp_bias": True})
    assert (config.attention_bias, config.mlp_bias) == (False, False)


def test_listed_factors_give_the_same_frequencies_as_the_scaling_that_they_state() -> None:
    scaled = Llama3Rope(**LLAMA3_SCALING, original_max_position_embeddings=64)
    factors = (DefaultRope().inv_freq(64) / scaled.inv_freq(64)).tolist()
    listed = cos_sin_table(FactorsRope(factors=factors), 64, 512)
    # Angles of up to 512 radians, whose last bit is 3e-5.
    torch.testing.assert_close(listed, cos_sin_table(scaled, 64, 512), atol=1e-4, rtol=0)
