"""Whole models on Triton's kernels, in the interpreter: in fp32 token for token what transformers gives."""

from pathlib import Path

import pytest

from kernels.quantised_linear import quantise_weight
from tests.model import harness, tiny_models

pytest.importorskip("triton", reason="Triton is not installed")

NUM_TOKENS = 4


@pytest.mark.parametrize("variant", ["biases", "wide_heads"])
def test_greedy_equals_transformers(variant: str, tmp_path: Path) -> None:
    model = tiny_models.save(variant, tmp_path)
    prompts = tiny_models.prompts()
    expected = [tiny_models.greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    runner = harness.load(tmp_path, kernels="triton")
    assert runner.ops.name == "triton (interpreter)"
    assert harness.greedy(runner, prompts, NUM_TOKENS, chunk=23) == expected


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_give_what_the_weights_they_stand_for_give(quantization: str, tmp_path: Path) -> None:
    model = tiny_models.save("grouped", tmp_path / "model")
    prompt = tiny_models.prompts()[1]
    head = "int8"
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight") or name == "lm_head.weight":
            bits = head if name == "lm_head.weight" else quantization
            parameter.data.copy_(quantise_weight(parameter.data, bits).dequantise())
    runner = harness.load(tmp_path / "model", kernels="triton", quantization=quantization)
    assert runner.ops.name == f"triton (interpreter, {quantization})"
    assert harness.greedy(runner, [prompt], 3) == [tiny_models.greedy(model, prompt, 3)]
