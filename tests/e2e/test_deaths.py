"""Workers that are killed while they serve: every stream goes on, with the tokens that it would have had."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.stack import Stack, ask, completion, stream_all, token_ids
from tests.e2e.test_pressure import SAMPLINGS
from tests.e2e.tiny import save_tiny


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("deaths")
    save_tiny(folder / "model")
    running = Stack(
        *(f"--model={folder / 'model'}", "--dtype=float32", "--kv-cache-memory=20MB"),
        *("--prefill=2", "--decode=2", "--max-batch-prefill-tokens=32"),
        log_dir=folder,
    )
    yield running
    assert running.stop() == 0


def bodies(first: int, num_prompt: int, num_tokens: int) -> list[dict[str, Any]]:
    prompts = [[(index * 29 + first + number) % 256 for index in range(num_prompt)] for number in range(8)]
    return [
        completion(prompt, max_tokens=num_tokens, **SAMPLINGS[number % len(SAMPLINGS)])
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("victim", ["decode-0", "decode-1"])
def test_streams_go_on_when_a_decode_worker_is_killed(stack: Stack, victim: str) -> None:
    requests = bodies(first=ord(victim[-1]), num_prompt=40, num_tokens=300)
    undisturbed = [token_ids(ask(stack.url, body)) for body in requests]
    streams = stream_all(stack.url, requests, when=(60, lambda: stack.kill(victim)))
    assert [stream.token_ids for stream in streams] == undisturbed
    assert [stream.num_terminal_frames for stream in streams] == [1] * len(streams)
    stack.wait_until_at_rest(num_workers=4)


def test_prompts_queued_at_a_prefill_worker_that_is_killed_are_computed_elsewhere(stack: Stack) -> None:
    requests = bodies(first=100, num_prompt=400, num_tokens=20)
    undisturbed = [token_ids(ask(stack.url, body)) for body in requests]
    requests = bodies(first=100, num_prompt=400, num_tokens=20)
    streams = stream_all(stack.url, requests, when=(0, lambda: stack.kill("prefill-0")))
    assert [stream.token_ids for stream in streams] == undisturbed
    assert [stream.num_terminal_frames for stream in streams] == [1] * len(streams)
    stack.wait_until_at_rest(num_workers=4)
