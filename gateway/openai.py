"""OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models."""

import logging
import time
from collections.abc import Sequence
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from common.errors import RequestError
from gateway.api import Api
from gateway.choices import Choice, Job, collect, merged, started
from gateway.connection import Answer, Client, JsonEndpoint
from gateway.http_errors import INTERNAL
from gateway.json_body import Json, convert
from gateway.openai_frames import CHAT, COMPLETION, ChunkWriter, Shape, answer, new_head
from gateway.openai_jobs import chat_job, completion_job
from gateway.openai_types import ChatBody, CompletionBody, SamplingBody, StreamOptions, check_not_built
from gateway.sse import DONE, EventStream, error_event

logger = logging.getLogger(__name__)


class OpenAI:
    """The handlers of OpenAI's API."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def routes(self) -> list[Route]:
        return [
            self._post("/v1/completions", self._complete),
            self._post("/v1/chat/completions", self._chat),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{id:path}", self._model, methods=["GET"]),
        ]

    def _post(self, path: str, handler: Answer) -> Route:
        limits = self._api.limits
        return Route(path, JsonEndpoint(handler, limits.max_body_bytes, limits.client_timeout_s), methods=["POST"])

    async def _complete(self, raw: Json, client: Client) -> None:
        arrival_s = time.perf_counter()
        check_not_built(raw)
        body = convert(raw, CompletionBody)
        await self._serve(COMPLETION, await completion_job(body, self._api), body, client, arrival_s)

    async def _chat(self, raw: Json, client: Client) -> None:
        arrival_s = time.perf_counter()
        check_not_built(raw)
        body = convert(raw, ChatBody)
        await self._serve(CHAT, await chat_job(body, self._api), body, client, arrival_s)

    async def _serve(self, shape: Shape, job: Job, body: SamplingBody, client: Client, arrival_s: float) -> None:
        head = new_head(shape.id_prefix, self._api.model.name, body.request_id)
        with_ids = body.return_token_ids or False
        with started(job, self._api, arrival_s) as choices:
            if not body.stream:
                outputs = await collect(choices)
                await client.send_json(answer(shape, head, choices, outputs, with_ids=with_ids))
                return
            options = body.stream_options or StreamOptions()
            with_usage = bool(options.include_usage and options.continuous_usage_stats)
            writer = ChunkWriter(shape, head, choices, with_ids=with_ids, with_usage=with_usage)
            await _stream(choices, writer, client, include_usage=options.include_usage or False)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        self._api.check_model(request.path_params["id"])
        return JSONResponse(self._card())

    def _card(self) -> Json:
        model = self._api.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "baton",
            "root": model.root,
            "parent": None,
            "max_model_len": self._api.backend.max_context,
        }


async def _stream(choices: Sequence[Choice], writer: ChunkWriter, client: Client, *, include_usage: bool) -> None:
    """Send every delta as it comes. A failure after the first byte is an event, and [DONE] ends the stream in any case.

    Raises: RequestError before the first byte.
    """
    stream = EventStream(client)
    try:
        async with aclosing(merged(choices)) as deltas:
            async for delta in deltas:
                if events := writer.events(delta):
                    await stream.write(events)
    except RequestError as error:
        if not stream.has_started:
            raise
        await stream.end(error_event(error) + DONE)
        return
    except Exception:
        if not stream.has_started:
            raise
        logger.exception("a stream broke off")
        await stream.end(error_event(INTERNAL) + DONE)
        return
    await stream.end(writer.usage() + DONE if include_usage else DONE)
