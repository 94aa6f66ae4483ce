"""How long a stream stands still when its decode worker is killed: `python -m tests.e2e.measure_resume 1024 4096`.

For each length of a prompt: the stream begins, as many other prompts come as fit into the prefill worker's cache, the
decode worker is killed (another one is there), and the longest wait for a token counts. Once the others fit beside what
is protected of the stream's prompt, and once they are one that needs all of the memory.
"""

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx

from tests.e2e.clients import completion
from tests.e2e.stack import Stack

KV_TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
"""Of the built-in model in float32."""
NUM_AFTER = 20
"""Tokens that are waited for in the end: more than can have been on their way to the client."""
SLOW_DECODE = "--itl-target=1000"
"""While others compute, so that the stream is not at its end before they are."""
VOCAB_SIZE = 49_000
OTHERS = {"kept": (0.5, 0.5, 0.5), "evicted": (1.5,)}
"""What becomes of the prompt in the cache, and the lengths of the others as shares of it."""


@dataclass(frozen=True)
class Stall:
    """longest_s: wait for one token; num_before: tokens that had come; num_computed: tokens of the next attempt."""

    longest_s: float
    num_before: int
    num_computed: int


def prompt(seed: int, num_tokens: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(1000, VOCAB_SIZE) for _ in range(num_tokens)]


def measure(num_prompt: int, others: Sequence[int], seed: int) -> Stall:
    """Everything anew, in a cache that holds one and a half such prompts."""
    memory = f"--kv-cache-memory={num_prompt * 3 // 2 * KV_TOKEN_BYTES}"
    with tempfile.TemporaryDirectory() as folder:
        options = ("--dtype=float32", "--decode=2", SLOW_DECODE, "--request-timeout=3600", memory)
        stack = Stack(*options, log_dir=Path(folder))
        try:
            return asyncio.run(_strike(stack, num_prompt, others, seed))
        finally:
            stack.stop()


async def _strike(stack: Stack, num_prompt: int, others: Sequence[int], seed: int) -> Stall:
    arrivals_s: list[float] = []
    begun = asyncio.Event()
    struck_s = 0.0

    async def read(client: httpx.AsyncClient) -> None:
        body = completion(prompt(seed, num_prompt), max_tokens=num_prompt // 2 - 16, stream=True)
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    assert "error" not in json.loads(line[6:]), line
                    arrivals_s.append(time.monotonic())
                    if len(arrivals_s) == 2:
                        begun.set()
                    if struck_s and arrivals_s[-NUM_AFTER] > struck_s:
                        return

    async with httpx.AsyncClient(base_url=stack.url, timeout=3600) as client:
        stream = asyncio.create_task(read(client))
        await begun.wait()
        for number, length in enumerate(others):
            other = completion(prompt(seed + 1 + number, length), max_tokens=1)
            (await client.post("/v1/completions", json=other)).raise_for_status()
        await asyncio.sleep(3)  # until what has been computed so far is in a status
        name, before = await asyncio.to_thread(_decoding, stack), await asyncio.to_thread(_num_computed, stack)
        struck_s, num_before = time.monotonic(), len(arrivals_s)
        stack.signal(name, signal.SIGKILL)
        await stream
        await asyncio.sleep(3)
        num_computed = await asyncio.to_thread(_num_computed, stack) - before
    after = [moment for moment in arrivals_s if moment > struck_s]
    waits = [later - earlier for earlier, later in zip([struck_s, *after], after, strict=False)]
    return Stall(max(waits), num_before, num_computed)


def _decoding(stack: Stack) -> str:
    (name,) = (name for name in ("decode-0", "decode-1") if stack.counters(name)["running"])
    return name


def _num_computed(stack: Stack) -> int:
    counters = stack.counters("prefill-0")
    return int(counters["prompt_tokens_computed"] + counters["output_tokens_computed"])


def main() -> None:
    out = sys.stdout
    out.write("| prompt | | longest wait | tokens before it | computed again |\n|---|---|---|---|---|\n")
    for num_prompt in map(int, sys.argv[1:]):
        for name, shares in OTHERS.items():
            others = [int(share * num_prompt) - 16 for share in shares]
            stall = measure(num_prompt, others, seed=num_prompt)
            numbers = num_prompt, stall.num_before, stall.num_computed
            prompt_len, before, computed = (f"{number:,}" for number in numbers)
            cells = prompt_len, name, f"{stall.longest_s:.1f} s", before, computed
            out.write(f"| {' | '.join(cells)} |\n")
            out.flush()


if __name__ == "__main__":
    main()
