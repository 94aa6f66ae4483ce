"""One exchange with one client: read a body, do the work, stop when the client leaves or does not read."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from common.errors import BatonError, RequestError
from gateway.http_errors import invalid
from gateway.json_body import Json, parse_object

_JSON_HEADERS = [(b"content-type", b"application/json")]


class ClientGone(BatonError):
    """The client closed the connection, or takes nothing from it."""


class Client:
    """Who sent a request. Every wait for it is bounded by timeout_s.

    `run_while_connected` watches over `send`, with one timer for all that is sent: to set one for each token would cost
    more than to encode the token.

    Mutable state: since when `send` waits.
    """

    def __init__(self, receive: Receive, send: Send, timeout_s: float) -> None:
        self._receive = receive
        self._send = send
        self._timeout_s = timeout_s
        self._sending_since_s: float | None = None

    async def read_body(self, max_bytes: int) -> bytes:
        """Read the whole body, however it is framed.

        Raises: RequestError 413 over max_bytes, 408 if it stalls; ClientGone.
        """
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive_bounded()
            if message["type"] == "http.disconnect":
                raise ClientGone("closed the connection before its request was complete")
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def wait_gone(self) -> None:
        """Return when the client has left. Only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send(self, message: Message) -> None:
        """Waits while the client does not read."""
        self._sending_since_s = time.monotonic()
        await self._send(message)
        self._sending_since_s = None

    def patience_s(self) -> float:
        """For how long it may still go on as it does.

        Raises: ClientGone if it has read nothing for too long.
        """
        if self._sending_since_s is None:
            return self._timeout_s
        left_s = self._sending_since_s + self._timeout_s - time.monotonic()
        if left_s <= 0:
            raise ClientGone(f"read nothing for {self._timeout_s:g} s")
        return left_s

    async def send_json(self, value: object) -> None:
        """Answer with one whole JSON body."""
        body = msgspec.json.encode(value)
        headers = [*_JSON_HEADERS, (b"content-length", b"%d" % len(body))]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def _receive_bounded(self) -> Message:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._receive()
        except TimeoutError as error:
            raise RequestError(408, f"the body stalled for {self._timeout_s:g} s") from error


Answer = Callable[[Json, Client], Awaitable[None]]
"""Serves one parsed body. May raise RequestError while nothing was sent; is cancelled when the client leaves."""


class JsonEndpoint:
    """An ASGI app for one POST route: reads a JSON object and runs `answer` for as long as the client is there."""

    def __init__(self, answer: Answer, max_body_bytes: int, client_timeout_s: float) -> None:
        self._answer = answer
        self._max_body_bytes = max_body_bytes
        self._client_timeout_s = client_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(receive, send, self._client_timeout_s)
        headers = Headers(scope=scope)
        _check_headers(headers, self._max_body_bytes)
        body = parse_object(await client.read_body(self._max_body_bytes))
        await run_while_connected(self._answer(body, client), client)


async def run_while_connected(work: Awaitable[None], client: Client) -> None:
    """Run work to its end; cancel it when the client leaves or does not read.

    Raises: what work raises; ClientGone.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.create_task(client.wait_gone())
    try:
        while not working.done():
            if gone.done():
                raise ClientGone("closed the connection")
            await asyncio.wait((working, gone), timeout=client.patience_s(), return_when=asyncio.FIRST_COMPLETED)
        working.result()
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.wait((working, gone))


def _check_headers(headers: Headers, max_bytes: int) -> None:
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise invalid(f"Content-Type must be application/json, got {media_type}")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(413, f"the body must be at most {max_bytes} bytes, got more", code="content_too_large")
