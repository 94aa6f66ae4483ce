"""A real HTTP server around the gateway's app, with the built-in model's tokenizer and a scripted engine."""

import json
import threading
from typing import Any

import httpx
import uvicorn

from common.metrics import GatewayMetrics
from common.model_files import find_model
from gateway.api import Api, Limits
from gateway.app import create_app
from gateway.served_model import ServedModel, load_served_model
from tests.service.fake_backend import FakeBackend, Script

MAX_CONTEXT = 400
START_S = 20.0


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = threading.Event()

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


class Gateway:
    """A running gateway. `backend.script` says what the engine does next."""

    def __init__(self, model: ServedModel, *, limits: Limits | None = None, api_keys: tuple[str, ...] = ()) -> None:
        self.backend = FakeBackend(MAX_CONTEXT)
        self.metrics = GatewayMetrics(model.name, self.backend.workers, dict)
        api = Api(backend=self.backend, model=model, limits=limits or Limits(), metrics=self.metrics)
        app = create_app(api, version="1.2.3", api_keys=api_keys)
        self._server = _Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        assert self._server.is_up.wait(START_S)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=20)

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(START_S)

    def reset(self) -> None:
        self.backend.script = Script()
        self.backend.missing = []
        self.backend.submitted.clear()

    def complete(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": "Hello", **body})

    def chat(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], **body})


def load_default_model() -> ServedModel:
    return load_served_model(find_model(""), "smollm2", created=1_700_000_000)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Every event but the [DONE] that must end them."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *data, done, rest = response.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(event.startswith(b"data: {") for event in data)
    return [json.loads(event.removeprefix(b"data: ")) for event in data]


def streamed_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """What a client puts together for one choice; checks that it has exactly one finish, at its end."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    assert [choice["finish_reason"] is not None for choice in choices] == [False] * (len(choices) - 1) + [True]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
