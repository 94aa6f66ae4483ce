"""A server that speaks enough of OpenAI's API to be measured, and misbehaves when told to."""

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

START_S = 20.0
PROMPT_S = 0.02
"""Before the first token."""

Behaviour = Callable[["BenchServer", Mapping[str, Any], Receive, Send], Any]


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def token_event(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})


def end_of(body: Mapping[str, Any]) -> bytes:
    num_prompt = len(body["prompt"]) if "prompt" in body else 7
    usage = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"]}
    return (
        event({"choices": [], "usage": usage, "baton_timings": {"queue_s": 0.5, "decode_s": 1.5}}) + b"data: [DONE]\n\n"
    )


async def answer(server: "BenchServer", body: Mapping[str, Any], receive: Receive, send: Send) -> None:
    """A token an event."""
    await start(send)
    await asyncio.sleep(PROMPT_S)
    for _ in range(body["max_tokens"]):
        if "messages" in body:
            await write(send, event({"choices": [{"index": 0, "delta": {"content": "word"}}]}))
        else:
            await write(send, token_event("word"))
    await write(send, end_of(body), is_last=True)


async def refuse(server: "BenchServer", body: Mapping[str, Any], receive: Receive, send: Send) -> None:
    await start(send, 503, b"application/json")
    await write(send, b'{"error": {"message": "no worker"}}', is_last=True)


async def fail_within(server: "BenchServer", body: Mapping[str, Any], receive: Receive, send: Send) -> None:
    await start(send)
    await write(
        send, token_event("a") + event({"error": {"message": "worker died"}}) + b"data: [DONE]\n\n", is_last=True
    )


async def cut_off(server: "BenchServer", body: Mapping[str, Any], receive: Receive, send: Send) -> None:
    """The connection breaks: uvicorn closes it when the answer is not ended."""
    await start(send)
    await write(send, token_event("a"))


async def end_early(server: "BenchServer", body: Mapping[str, Any], receive: Receive, send: Send) -> None:
    await start(send)
    await write(send, token_event("a"), is_last=True)


async def hang(server: "BenchServer", body: Mapping[str, Any], receive: Receive, send: Send) -> None:
    """A token, then nothing until the client leaves."""
    await start(send)
    await write(send, token_event("a"))
    server.on_hang()
    while (await receive())["type"] != "http.disconnect":
        pass


async def start(send: Send, status: int = 200, content_type: bytes = b"text/event-stream") -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]})


async def write(send: Send, data: bytes, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not is_last})


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = threading.Event()

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


class BenchServer:
    """script: how the next requests are answered; those after it well.  asked: the bodies so far."""

    def __init__(self) -> None:
        self.script: list[Behaviour] = []
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.on_hang: Callable[[], None] = lambda: None
        self._server = _Server(uvicorn.Config(self._app, port=0, interface="asgi3", log_config=None, lifespan="off"))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        assert self._server.is_up.wait(START_S)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(START_S)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/models":
            await start(send, content_type=b"application/json")
            await write(send, b'{"data": [{"id": "tiny"}]}', is_last=True)
            return
        data, is_more = b"", True
        while is_more:
            message = await receive()
            data, is_more = data + message["body"], message["more_body"]
        self.asked.append(json.loads(data))
        self.paths.append(scope["path"])
        behave = self.script.pop(0) if self.script else answer
        await behave(self, self.asked[-1], receive, send)
