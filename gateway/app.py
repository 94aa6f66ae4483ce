"""Puts the HTTP front together."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from common.errors import RequestError
from gateway.api import Api
from gateway.border import Border
from gateway.http_errors import on_http_exception, on_request_error
from gateway.openai import OpenAI
from gateway.operations import Operations


def create_app(
    api: Api, *, version: str, api_keys: Sequence[str] = (), allowed_origins: Sequence[str] = ("*",)
) -> Starlette:
    """The gateway's ASGI app. It starts and stops nothing: the backend is running for as long as the app is."""
    app = Starlette(
        routes=[*OpenAI(api).routes(), *Operations(api, version).routes()],
        middleware=[Middleware(Border, api_keys=api_keys, allowed_origins=allowed_origins)],
        exception_handlers={RequestError: on_request_error, HTTPException: on_http_exception},
    )
    app.router.redirect_slashes = False  # a path that is not there is 404, as at OpenAI
    return app
