"""Pools that are too small, and requests of unlike length."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.clients import SAMPLINGS, ask, ask_all, completion, token_ids
from tests.e2e.stack import Stack
from tests.e2e.tiny import BLOCK_BYTES, save_tiny


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A pool of 24 blocks (384 tokens) on either side."""
    folder = tmp_path_factory.mktemp("pressure")
    save_tiny(folder / "model")
    running = Stack(
        f"--model={folder / 'model'}",
        "--dtype=float32",
        f"--kv-cache-memory={24 * BLOCK_BYTES}",
        "--max-batch-prefill-tokens=64",
        log_dir=folder,
    )
    yield running
    assert running.stop() == 0


def bodies(num_tokens: int) -> list[dict[str, Any]]:
    prompts = [[(index * 31 + number) % 256 for index in range(30)] for number in range(8)]
    return [
        completion(prompt, max_tokens=num_tokens, **SAMPLINGS[number % len(SAMPLINGS)])
        for number, prompt in enumerate(prompts)
    ]


def test_forced_preemption_does_not_change_a_token(stack: Stack) -> None:
    alone = [token_ids(ask(stack.url, body)) for body in bodies(120)]
    before = stack.counters("decode-0")["preemptions"]
    together = [token_ids(answer) for answer in ask_all(stack.url, bodies(120))]
    assert together == alone
    stack.wait_until(lambda: stack.counters("decode-0")["preemptions"] > before)
    stack.wait_until_at_rest()


def test_a_request_larger_than_the_pool_is_refused_with_both_numbers(stack: Stack) -> None:
    response = httpx.post(f"{stack.url}/v1/completions", json=completion([1] * 400, max_tokens=5), timeout=20)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "400" in error["message"]
    assert "384" in error["message"]


def test_a_request_that_fills_the_pool_is_served(stack: Stack) -> None:
    answer = ask(stack.url, completion([1] * 300, max_tokens=84))
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": 300, "completion_tokens": 84}
