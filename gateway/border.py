"""What surrounds every exchange: request ids, CORS, API keys, and an answer for our own bugs."""

import hmac
import logging
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import RequestError
from gateway.connection import ClientGone
from gateway.http_errors import INTERNAL, error_response

logger = logging.getLogger(__name__)

_OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics", "/version", "/load"})
_METHODS = "GET, HEAD, POST, OPTIONS"
_STAINLESS = ("arch", "lang", "os", "package-version", "retry-count", "runtime", "runtime-version", "timeout")
_HEADERS = ", ".join(
    ["authorization", "content-type", "x-api-key", "x-request-id", *(f"x-stainless-{name}" for name in _STAINLESS)]
)
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_HEADER_LIST = re.compile(r"[\w\-, ]{1,4096}", re.ASCII)


class Border:
    """An ASGI middleware.

    api_keys:         none for a gateway that is open to all
    allowed_origins:  of CORS; "*" is every one
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], allowed_origins: Sequence[str]) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in api_keys]
        self._allowed_origins = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        added = {"X-Request-Id": request_id, **self._cors(headers.get("origin"))}
        has_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message).update(added)
            await send(message)

        try:
            await self._respond(scope, headers)(scope, receive, send_with_headers)
        except ClientGone as error:
            logger.info("%s: client gone: %s", request_id, error)
        except Exception:
            logger.exception("%s: %s %s failed", request_id, scope["method"], scope["path"])
            if has_started:
                raise  # the server cuts the connection, which tells the client
            await error_response(INTERNAL)(scope, receive, send_with_headers)

    def _respond(self, scope: Scope, headers: Headers) -> ASGIApp:
        if scope["method"] == "OPTIONS":
            return _preflight(headers)
        if not self._may_pass(scope["path"], headers):
            return error_response(
                RequestError(
                    401, "an API key is needed and none or another was sent", "authentication_error", "invalid_api_key"
                )
            )
        return self._app

    def _may_pass(self, path: str, headers: Headers) -> bool:
        if not self._api_keys or path in _OPEN_PATHS:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        sent = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return any(hmac.compare_digest(sent.encode(), key) for key in self._api_keys)

    def _cors(self, origin: str | None) -> dict[str, str]:
        if "*" in self._allowed_origins:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": "X-Request-Id"}
        if origin is None or origin not in self._allowed_origins:
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "X-Request-Id",
            "Vary": "Origin",
        }


def _preflight(headers: Headers) -> Response:
    asked = headers.get("access-control-request-headers", "")
    allowed = f"{_HEADERS}, {asked}" if _HEADER_LIST.fullmatch(asked) else _HEADERS
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Allow-Headers": allowed,
            "Access-Control-Max-Age": "86400",
        },
    )
