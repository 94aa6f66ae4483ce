"""Workers that do both: the same tokens as separate pools, also when they die, run out of blocks, or clients leave."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.clients import SAMPLINGS, ask_all, completion, stream_all, token_ids
from tests.e2e.stack import Stack
from tests.e2e.test_greedy import chat_prompts, text_tokens
from tests.e2e.tiny import BLOCK_BYTES, save_tiny
from tests.model import smollm2
from tests.model.reference import chosen_greedily


def test_greedy_tokens_are_those_of_transformers_beside_a_prompt_in_chunks(tmp_path: Path) -> None:
    prompts, lengths = [*chat_prompts()[:8], text_tokens(300)], [32] * 8 + [4]
    bodies = [completion(prompt, max_tokens=length) for prompt, length in zip(prompts, lengths, strict=True)]
    sizes = ("--kv-cache-memory=900MB", "--max-batch-prefill-tokens=64")
    stack = Stack("--role=both", "--dtype=float32", *sizes, log_dir=tmp_path)
    try:
        assert httpx.get(f"{stack.url}/ready").status_code == 200
        answers = [token_ids(answer) for answer in ask_all(stack.url, bodies)]
        stack.wait_until_at_rest(num_workers=1)
        counters = stack.counters("aggregated-0")
    finally:
        assert stack.stop() == 0
    for prompt, length, answer in zip(prompts, lengths, answers, strict=True):
        assert answer == chosen_greedily(smollm2.reference(), prompt, answer)
        assert len(answer) == length
    assert counters["first_tokens_sampled"] == len(prompts)
    assert counters["prompt_tokens_computed"] + counters["cached_tokens"] == sum(map(len, prompts))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers, each with a pool of 24 blocks (384 tokens)."""
    folder = tmp_path_factory.mktemp("aggregated")
    save_tiny(folder / "model")
    running = Stack(
        *("--role=both", "--aggregated=2", f"--model={folder / 'model'}", "--dtype=float32"),
        *(f"--kv-cache-memory={24 * BLOCK_BYTES}", "--max-batch-prefill-tokens=32"),
        log_dir=folder,
    )
    yield running
    assert running.stop() == 0


def test_streams_go_on_when_a_worker_is_killed_and_when_blocks_run_out(stack: Stack) -> None:
    requests = [
        completion([(index * 31 + number) % 256 for index in range(40)], max_tokens=100, **SAMPLINGS[number % 4])
        for number in range(12)
    ]
    undisturbed = [token_ids(answer) for answer in ask_all(stack.url, requests)]
    names = ("aggregated-0", "aggregated-1")
    stack.wait_until(lambda: sum(stack.counters(name)["preemptions"] for name in names) > 0)
    old_pid = stack.pid(names[0])
    streams = stream_all(stack.url, requests, when=[(100, lambda: stack.signal(names[0], signal.SIGKILL))])
    assert [stream.token_ids for stream in streams] == undisturbed
    assert [stream.num_terminal_frames for stream in streams] == [1] * len(requests)
    stack.wait_until_restarted(names[0], old_pid)
    stack.wait_until_at_rest(num_workers=2)


def test_nothing_is_left_of_clients_that_leave(stack: Stack) -> None:
    async def leave(client: httpx.AsyncClient, number: int) -> None:
        try:
            async with asyncio.timeout(number * 0.01):
                await client.post("/v1/completions", json=completion([number] * (5 + number), max_tokens=200))
        except TimeoutError:
            pass

    async def leave_all() -> None:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
            await asyncio.gather(*(leave(client, number) for number in range(40)))

    stack.wait_until_at_rest(num_workers=2)
    asyncio.run(leave_all())
    stack.wait_until_at_rest(num_workers=2)
    assert stack.metric("vllm:num_requests_running") == stack.metric("vllm:num_requests_waiting") == 0
