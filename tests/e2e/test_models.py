"""Folders of safetensors through the whole stack: every accepted architecture, and one that is not."""

from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from tests.e2e.clients import ask_all, completion, token_ids
from tests.e2e.stack import START_S, Command, Stack
from tests.e2e.tiny import save_tiny
from tests.model.reference import chosen_greedily

PROMPTS = [[(index * 37 + start) % 256 for index in range(length)] for start, length in ((1, 1), (2, 17), (3, 100))]
NUM_TOKENS = 40


# The first is in test_transport.py as well, by every route.
@pytest.mark.parametrize("variant", [pytest.param("grouped", marks=pytest.mark.full), "llama3_rope", "mistral"])
def test_a_folder_gives_the_tokens_of_transformers(variant: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", variant)
    stack = Stack(f"--model={tmp_path / 'model'}", "--dtype=float32", "--kv-cache-memory=20MB", log_dir=tmp_path)
    try:
        answers = ask_all(stack.url, [completion(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS])
    finally:
        assert stack.stop() == 0
    assert [answer["model"] for answer in answers] == ["model"] * len(PROMPTS)
    for prompt, answer in zip(PROMPTS, map(token_ids, answers), strict=True):
        assert answer == chosen_greedily(model, prompt, answer)
        assert len(answer) == NUM_TOKENS


def test_an_unsupported_architecture_is_refused_at_start_by_name(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=257)).save_pretrained(tmp_path / "model")
    serve = Command("serve", "--port=0", f"--model={tmp_path / 'model'}", f"--log-dir={tmp_path}")
    try:
        told = serve.wait_for(r"(.*GPT2LMHeadModel.*)", START_S)
        assert serve.wait(START_S) == 2
    finally:
        serve.close()
    assert "LlamaForCausalLM" in told
    assert "MistralForCausalLM" in told


def test_a_cache_larger_than_the_memory_is_refused_at_start_with_both_sizes(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    options = (f"--model={tmp_path / 'model'}", "--kv-cache-memory=10TB", f"--log-dir={tmp_path}")
    serve = Command("serve", "--port=0", *options)
    try:
        told = serve.wait_for(r"(.*kv_cache_memory.*)", START_S)
        assert serve.wait(START_S) == 2
    finally:
        serve.close()
    assert "that are free, got 10000.0 GB" in told
