"""Clients of the real stack: bodies, one request, many at once, streams."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 7, "top_p": 0.9},
    {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.8, "seed": -3, "frequency_penalty": 1.0, "min_tokens": 20},
]
"""Each gives the same tokens every time."""


def completion(prompt: Sequence[int] | str, **options: Any) -> dict[str, Any]:
    """The body of a request that is greedy, goes on past end tokens and tells token ids."""
    return {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **options}


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """One completion, not streamed."""
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def ask_all(url: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All at once."""

    async def run() -> list[dict[str, Any]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
            responses = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        for response in responses:
            assert response.status_code == 200, response.text
        return [response.json() for response in responses]

    return asyncio.run(run())


@dataclass
class Stream:
    """What one streaming client saw. times in seconds since all began."""

    token_ids: list[int] = field(default_factory=list[int])
    num_terminal_frames: int = 0
    ended_s: float = 0.0


def stream_all(
    url: str,
    bodies: Sequence[dict[str, Any]],
    *,
    delays_s: Sequence[float] | None = None,
    when: Sequence[tuple[int, Callable[[], None]]] = (),
) -> list[Stream]:
    """All at once, or each after its delay; `when` (count, action): act once that many tokens came, over all streams.

    Fails on an error event, and on anything after the end.
    """
    streams = [Stream() for _ in bodies]
    started_s = time.monotonic()
    actions = deque(when)

    def act_if_due() -> None:
        while actions and sum(len(stream.token_ids) for stream in streams) >= actions[0][0]:
            actions.popleft()[1]()

    async def run_one(client: httpx.AsyncClient, index: int) -> None:
        await asyncio.sleep(delays_s[index] if delays_s else 0.0)
        stream = streams[index]
        async with client.stream("POST", "/v1/completions", json={**bodies[index], "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    stream.num_terminal_frames += 1
                elif line:
                    assert stream.num_terminal_frames == 0
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    stream.token_ids += chunk["choices"][0].get("token_ids", [])
                    act_if_due()
        stream.ended_s = time.monotonic() - started_s

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            await asyncio.gather(*(run_one(client, index) for index in range(len(bodies))))

    asyncio.run(run())
    assert not actions, "the moment to act never came"
    return streams


def token_ids(answer: dict[str, Any]) -> list[int]:
    """Of the only choice."""
    (choice,) = answer["choices"]
    return choice["token_ids"]
