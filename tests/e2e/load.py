"""Clients that stream without a pause while something happens to the stack."""

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

import httpx

TIMEOUT_S = 120.0


@dataclass
class LoadStream:
    """What one client saw of one request.

    body:    which of the load's bodies it was
    gaps_s:  between the frames that brought tokens
    error:   of HTTP, of the connection, or in the stream; empty: none
    """

    body: int
    token_ids: list[int] = field(default_factory=list[int])
    gaps_s: list[float] = field(default_factory=list[float])
    num_terminal_frames: int = 0
    error: str = ""


class Load:
    """While entered, so many clients send one body after the other. Leaving waits for the streams that are under way.

    Mutable state, the thread's: the streams so far, which others may read.
    """

    def __init__(self, url: str, bodies: Sequence[dict[str, Any]], num_clients: int) -> None:
        self.streams: list[LoadStream] = []
        self._url = url
        self._bodies = bodies
        self._num_clients = num_clients
        self._numbers = count()
        self._is_leaving = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_leaving.set()
        self._thread.join()

    @property
    def num_tokens(self) -> int:
        return sum(len(stream.token_ids) for stream in self.streams)

    @property
    def gaps_s(self) -> list[float]:
        return [gap_s for stream in self.streams for gap_s in stream.gaps_s]

    @property
    def longest_gap_s(self) -> float:
        return max(self.gaps_s)

    def wait_for_tokens(self, number: int) -> None:
        """Until so many more have come, over all streams."""
        wanted = self.num_tokens + number
        deadline = time.monotonic() + TIMEOUT_S
        while self.num_tokens < wanted:
            assert self._thread.is_alive(), "the clients have ended"
            assert time.monotonic() < deadline, f"{wanted - self.num_tokens} of {number} tokens have not come"
            threading.Event().wait(0.02)

    def check(self, answers: Sequence[Sequence[int]]) -> None:
        """Every stream came to its one end, with the tokens of the undisturbed answer to its body."""
        assert self.streams
        for stream in self.streams:
            assert not stream.error, stream.error
            assert stream.num_terminal_frames == 1
            assert stream.token_ids == list(answers[stream.body])

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, limits=limits) as client:
            await asyncio.gather(*(self._be_client(client) for _ in range(self._num_clients)))

    async def _be_client(self, client: httpx.AsyncClient) -> None:
        while not self._is_leaving.is_set():
            stream = LoadStream(next(self._numbers) % len(self._bodies))
            self.streams.append(stream)
            try:
                await self._follow(client, stream)
            except httpx.HTTPError as error:
                stream.error = f"{type(error).__name__}: {error}"
                return

    async def _follow(self, client: httpx.AsyncClient, stream: LoadStream) -> None:
        body = {**self._bodies[stream.body], "stream": True}
        last_s = 0.0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                stream.error = f"{response.status_code}: {(await response.aread()).decode()}"
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    stream.num_terminal_frames += 1
                elif line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    stream.error = stream.error or json.dumps(chunk.get("error", ""))[1:-1]
                    if token_ids := [token for choice in chunk.get("choices", ()) for token in choice["token_ids"]]:
                        now = time.monotonic()
                        stream.gaps_s += [now - last_s] if stream.token_ids else []
                        stream.token_ids += token_ids
                        last_s = now
