"""The real stack as an operator starts it: `baton serve`, real processes, real HTTP."""

import asyncio
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

BATON = Path(__file__).parents[2] / "baton.py"
START_S = 90.0
REST_S = 20.0
"""Statuses come twice a second, so what the workers hold is known to the gateway a little later."""


class Stack:
    """A running `baton serve` on free ports. Its output is read by a thread, so that every wait has a deadline."""

    def __init__(self, *options: str, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.shown = ""
        self._process = subprocess.Popen(
            [sys.executable, str(BATON), "serve", "--port=0", f"--log-dir={log_dir}", *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = ""
        try:
            self.url = self._wait_for(r"Baton is ready at (http://\S+)", START_S)
        except BaseException:
            self.stop()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def _wait_for(self, pattern: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.shown)):
            try:
                self.shown += self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"waited for {pattern!r}, got {self.shown!r}")
        return found[1]

    def pid(self, name: str) -> int:
        """Of the child with this name (`gateway`, `prefill-0`, `decode-1`, …)."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for pid in children:
            argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if f"--name={name}" in argv or (name == "gateway" and "gateway" in argv):
                return int(pid)
        raise AssertionError(f"no child is called {name}")

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    def counters(self, worker: str) -> dict[str, float]:
        """What /metrics says of a worker, by short name."""
        text = httpx.get(f"{self.url}/metrics").text
        pattern = rf'^baton_worker_(\w+)\{{[^}}]*worker="{worker}"[^}}]*\}} (\S+)$'
        return {name: float(value) for name, value in re.findall(pattern, text, re.MULTILINE)}

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float = REST_S) -> None:
        """Ask again with every status until it holds."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline, f"not so after {timeout_s} s"
            threading.Event().wait(0.2)

    def gauge(self, name: str) -> float:
        """The value of a metric of the gateway that has one series."""
        text = httpx.get(f"{self.url}/metrics").text
        (value,) = re.findall(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
        return float(value)

    def wait_until_at_rest(self, num_workers: int = 2) -> None:
        """All workers are there, and none owns a block."""

        def is_at_rest() -> bool:
            text = httpx.get(f"{self.url}/metrics").text
            owned = re.findall(r"^baton_worker_owned_blocks\{[^}]*\} (\S+)$", text, re.MULTILINE)
            return len(owned) == num_workers and not any(map(float, owned))

        self.wait_until(is_at_rest)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._process.terminate()
        try:
            return self._process.wait(10.0)
        finally:
            self._process.kill()
            self._reader.join()
            assert self._process.stdout is not None
            self._process.stdout.close()


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
    when: tuple[int, Callable[[], None]] | None = None,
) -> list[Stream]:
    """All at once, or each after its delay; `when` (count, action): act once that many tokens came, over all streams.

    Fails on an error event, and on anything after the end.
    """
    streams = [Stream() for _ in bodies]
    started_s = time.monotonic()
    action = when

    def act_if_due() -> None:
        nonlocal action
        if action and sum(len(stream.token_ids) for stream in streams) >= action[0]:
            due, action = action[1], None
            due()

    async def run_one(client: httpx.AsyncClient, index: int) -> None:
        await asyncio.sleep(delays_s[index] if delays_s else 0.0)
        stream = streams[index]
        async with client.stream("POST", "/v1/completions", json={**bodies[index], "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            act_if_due()
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
    assert action is None, "the moment to act never came"
    return streams


def token_ids(answer: dict[str, Any]) -> list[int]:
    """Of the only choice."""
    (choice,) = answer["choices"]
    return choice["token_ids"]
