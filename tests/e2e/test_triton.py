"""The whole stack on Triton's kernels, which their interpreter runs without a GPU."""

from pathlib import Path

import pytest

from tests.e2e.clients import ask_all, completion, token_ids
from tests.e2e.stack import Stack
from tests.e2e.tiny import save_tiny

pytest.importorskip("triton", reason="Triton is not installed")

BODIES = [
    completion([7], max_tokens=4),
    completion(list(range(20)), max_tokens=4),
    completion([5, 6, 7], max_tokens=4, temperature=0.9, top_p=0.8, top_k=40, seed=11),
]


def ask(folder: Path, kernels: str) -> list[list[int]]:
    options = ("--dtype=float32", "--kv-cache-memory=2MB", "--max-model-len=32", f"--kernels={kernels}")
    stack = Stack(f"--model={folder / 'model'}", *options, log_dir=folder)
    try:
        return [token_ids(answer) for answer in ask_all(stack.url, BODIES)]
    finally:
        assert stack.stop() == 0


def test_triton_serves_the_very_tokens_of_the_reference_ops(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    answers = ask(tmp_path, "triton")
    assert [len(answer) for answer in answers] == [4, 4, 4]
    assert answers == ask(tmp_path, "reference")
    assert "triton (interpreter) kernels" in (tmp_path / "decode-0.log").read_text()
