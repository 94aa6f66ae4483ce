"""Clients that stream without a pause while something happens to the stack."""

import asyncio
import json
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import httpx

TIMEOUT_S = 300.0
RETRY_S = 0.1


@dataclass
class LoadStream:
    """What one client saw of one request.

    body:          which of the load's bodies it was
    began_s:       when it was asked for first
    times_s:       when frames came that brought tokens
    error:         of HTTP or in the stream; empty: none
    num_broken:    times that the gateway died or left before the answer was complete
    """

    body: int
    began_s: float
    token_ids: list[int] = field(default_factory=list[int])
    times_s: list[float] = field(default_factory=list[float])
    num_terminal_frames: int = 0
    error: str = ""
    num_broken: int = 0

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Between two frames that brought tokens: from when to when."""
        return list(pairwise(self.times_s))

    @property
    def is_told_to_come_again(self) -> bool:
        return "service_unavailable" in self.error

    def begin_again(self) -> None:
        """Whatever came until now is void."""
        self.token_ids, self.times_s = [], []
        self.num_terminal_frames, self.error = 0, ""
        self.num_broken += 1


class Load:
    """While entered, so many clients send one body after the other. Leaving waits for the streams that are under way.

    num_requests:  in all; None: until it is left
    is_patient:    a client asks again when the gateway dies, leaves or is not there, until it is answered
    Mutable state, the thread's: the streams so far, which others may read.
    """

    def __init__(
        self,
        url: str,
        bodies: Sequence[dict[str, Any]],
        num_clients: int,
        *,
        num_requests: int | None = None,
        is_patient: bool = False,
    ) -> None:
        self.streams: list[LoadStream] = []
        self._url = url
        self._bodies = bodies
        self._num_clients = num_clients
        self._num_requests = num_requests
        self._is_patient = is_patient
        self._is_leaving = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_leaving.set()
        self._thread.join()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def num_tokens(self) -> int:
        return sum(len(stream.token_ids) for stream in self.streams)

    def gaps_s(self, since_s: float = -math.inf, until_s: float = math.inf) -> list[float]:
        """Of all streams, those that ended meanwhile."""
        gaps = [gap for stream in self.streams for gap in stream.gaps]
        return [end_s - start_s for start_s, end_s in gaps if since_s <= end_s < until_s]

    @property
    def longest_gap_s(self) -> float:
        return max(self.gaps_s())

    def stall_s(self, moment_s: float) -> float:
        """From then until each stream that was there had its next token: the longest."""
        streams = [stream for stream in self.streams if stream.began_s < moment_s]
        next_s = (next((came_s for came_s in stream.times_s if came_s > moment_s), moment_s) for stream in streams)
        return max(next_s) - moment_s

    def wait_for_tokens(self, number: int) -> None:
        """Until so many more have come, over all streams."""
        wanted = self.num_tokens + number
        deadline = time.monotonic() + TIMEOUT_S
        while self.num_tokens < wanted:
            assert not self.is_over, "the clients have ended"
            assert time.monotonic() < deadline, f"{wanted - self.num_tokens} of {number} tokens have not come"
            threading.Event().wait(0.02)

    def wait(self) -> None:
        """Until all requests have been answered."""
        self._thread.join()

    def check(self, answers: Sequence[Sequence[int]]) -> None:
        """Every stream came to its one end, with the tokens of the undisturbed answer to its body."""
        self.check_ends()
        for stream in self.streams:
            assert stream.token_ids == list(answers[stream.body])

    def check_ends(self) -> None:
        """Every stream came to its one end."""
        assert self.streams
        for stream in self.streams:
            assert not stream.error, stream.error
            assert stream.num_terminal_frames == 1

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        numbers = deque(range(self._num_requests)) if self._num_requests is not None else None
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, limits=limits) as client:
            await asyncio.gather(*(self._be_client(client, numbers) for _ in range(self._num_clients)))

    async def _be_client(self, client: httpx.AsyncClient, numbers: deque[int] | None) -> None:
        while numbers or (numbers is None and not self._is_leaving.is_set()):
            number = numbers.popleft() if numbers else len(self.streams)
            stream = LoadStream(number % len(self._bodies), time.monotonic())
            self.streams.append(stream)
            try:
                while not await self._is_answered(client, stream):
                    await asyncio.sleep(RETRY_S)
            except httpx.HTTPError as error:
                stream.error = f"{type(error).__name__}: {error}"
                return

    async def _is_answered(self, client: httpx.AsyncClient, stream: LoadStream) -> bool:
        try:
            await self._follow(client, stream)
        except httpx.TimeoutException:
            raise
        except httpx.TransportError:
            if not self._is_patient:
                raise
        else:
            if not (self._is_patient and stream.is_told_to_come_again):
                return True
        stream.begin_again()
        return False

    async def _follow(self, client: httpx.AsyncClient, stream: LoadStream) -> None:
        body = {**self._bodies[stream.body], "stream": True}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                stream.error = f"{response.status_code}: {(await response.aread()).decode()}"
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    stream.num_terminal_frames += 1
                elif line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    stream.error = stream.error or json.dumps(chunk.get("error", ""))[1:-1]
                    token_ids = [token for choice in chunk.get("choices", ()) for token in choice.get("token_ids", ())]
                    if token_ids:
                        stream.times_s.append(time.monotonic())
                        stream.token_ids += token_ids
