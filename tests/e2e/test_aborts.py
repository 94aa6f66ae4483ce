"""Clients that leave, at any moment: nothing hangs, and nothing of them is left behind."""

import asyncio
from pathlib import Path
from random import Random

import httpx

from tests.e2e.clients import ask, completion
from tests.e2e.stack import Stack
from tests.e2e.tiny import save_tiny

NUM_REQUESTS = 500
NUM_AT_ONCE = 32


async def _one(client: httpx.AsyncClient, seed: int) -> bool:
    """A request, streamed or not; every third leaves after a moment. Returns whether it was served to its end."""
    random = Random(seed)
    prompt = [random.randrange(256) for _ in range(random.choice((3, 20, 150, 350)))]
    body = completion(prompt, max_tokens=random.choice((1, 10, 100)), stream=random.random() < 0.5, temperature=1)
    leaves_after_s = random.uniform(0, 0.3) if random.random() < 0.3 else None
    try:
        async with asyncio.timeout(leaves_after_s):
            response = await client.post("/v1/completions", json=body)
    except TimeoutError:
        return False
    assert response.status_code == 200, response.text
    assert "error" not in response.text
    return True


async def _all(url: str) -> int:
    places = asyncio.Semaphore(NUM_AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:

        async def one(seed: int) -> bool:
            async with places:
                return await _one(client, seed)

        return sum(await asyncio.gather(*(one(seed) for seed in range(NUM_REQUESTS))))


def test_nothing_is_left_of_500_requests_of_which_a_third_is_aborted(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    stack = Stack(f"--model={tmp_path / 'model'}", "--kv-cache-memory=2MB", "--dtype=float32", log_dir=tmp_path)
    try:
        num_served = asyncio.run(_all(stack.url))
        assert 250 < num_served < NUM_REQUESTS
        stack.wait_until_at_rest()
        assert stack.metric("vllm:num_requests_running") == stack.metric("vllm:num_requests_waiting") == 0
        assert ask(stack.url, completion([1, 2, 3], max_tokens=5))["usage"]["completion_tokens"] == 5
    finally:
        assert stack.stop() == 0
