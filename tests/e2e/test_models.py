"""Folders of safetensors through the whole stack: every accepted architecture, and one that is not."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.e2e.stack import BATON, Stack, ask, ask_all, completion, token_ids
from tests.e2e.tiny import save_tiny

PROMPTS = [[(index * 37 + start) % 256 for index in range(length)] for start, length in ((1, 1), (2, 17), (3, 100))]


@pytest.mark.parametrize("variant", ["grouped", "llama3_rope", "mistral"])
def test_a_folder_gives_the_tokens_of_transformers(variant: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", variant)
    stack = Stack(f"--model={tmp_path / 'model'}", "--dtype=float32", "--kv-cache-memory=20MB", log_dir=tmp_path)
    try:
        answers = ask_all(stack.url, [completion(prompt, max_tokens=40) for prompt in PROMPTS])
        assert answers[0]["model"] == "model"
    finally:
        assert stack.stop() == 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        inputs = torch.tensor([prompt])
        with torch.inference_mode():
            expected = model.generate(  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=40, do_sample=False, eos_token_id=None
            )
        assert token_ids(answer) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_both_transports_carry_every_block(transport: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    options = (f"--model={tmp_path / 'model'}", "--dtype=float32", "--kv-cache-memory=20MB")
    stack = Stack(*options, f"--kv-transport={transport}", log_dir=tmp_path)
    try:
        assert len(token_ids(ask(stack.url, completion(PROMPTS[2], max_tokens=5)))) == 5
        stack.wait_until(lambda: stack.counters("decode-0")[f"kv_received_bytes_{transport}"] > 0)
        counters = stack.counters("decode-0")
    finally:
        assert stack.stop() == 0
    other = {"tcp": "shm", "shm": "tcp"}[transport]
    block_bytes = 3 * 2 * 2 * 16 * 8 * 4
    assert counters[f"kv_received_bytes_{transport}"] == -(-len(PROMPTS[2]) // 16) * block_bytes
    assert counters[f"kv_received_bytes_{other}"] == 0


def test_an_unsupported_architecture_is_refused_at_start_by_name(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=257)).save_pretrained(tmp_path / "model")
    command = [
        sys.executable,
        str(BATON),
        "serve",
        "--port=0",
        f"--model={tmp_path / 'model'}",
        f"--log-dir={tmp_path}",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "GPT2LMHeadModel" in ended.stdout
    assert "LlamaForCausalLM" in ended.stdout
