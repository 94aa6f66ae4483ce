"""Whole models on Triton's kernels, in the interpreter: in fp32 token for token what transformers gives."""

from pathlib import Path

import pytest

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
