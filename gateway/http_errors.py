"""Errors as an HTTP client sees them: always JSON of OpenAI's shape, never a traceback."""

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError

INTERNAL = RequestError(500, "internal error; the server's log has the details", "internal_server_error")
_TYPES = {400: "invalid_request_error", 404: "not_found_error", 405: "invalid_request_error"}
_NOT_WORTH_RETRYING = (500, 501)


def invalid(message: str, param: str | None = None, code: str | None = None) -> RequestError:
    """A request that can never be served as it is."""
    return RequestError(400, message, param=param, code=code)


def not_built(param: str) -> RequestError:
    """A parameter that the API has and Baton does not, with another value than its default."""
    return RequestError(501, f"{param} is not supported by this server", "NotImplementedError", param=param)


def error_object(error: RequestError) -> dict[str, object]:
    """The value of the body's `error`; all four keys are always there."""
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}


def error_response(error: RequestError) -> Response:
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status in _NOT_WORTH_RETRYING:
        headers["X-Should-Retry"] = "false"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 413:
        headers["Connection"] = "close"  # the rest of the body is not read
    body = msgspec.json.encode({"error": error_object(error)})
    return Response(body, error.status, headers, media_type="application/json")


def on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


def on_http_exception(request: Request, error: Exception) -> Response:
    """What Starlette itself raises: 404 for unknown paths, 405 for wrong methods."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = error_response(RequestError(error.status_code, message, _TYPES.get(error.status_code, "error")))
    response.headers.update(error.headers or {})
    return response
