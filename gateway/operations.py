"""What operators and their probes ask: health, readiness, metrics, load, version."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from common.errors import RequestError
from common.metrics import CONTENT_TYPE
from gateway.api import Api
from gateway.http_errors import error_response


class Operations:
    """The handlers of everything that is not an inference API."""

    def __init__(self, api: Api, version: str) -> None:
        self._api = api
        self._version = version

    def routes(self) -> list[Route]:
        return [
            Route("/health", self._health, methods=["GET"]),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/ready", self._health, methods=["GET"]),
            Route("/load", self._load, methods=["GET"]),
            Route("/version", self._show_version, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]

    async def _health(self, request: Request) -> Response:
        """A gateway whose pools are gone, or match in no pair, cannot serve, so it is neither ready nor healthy."""
        missing = self._api.backend.missing_pools()
        return Response() if not missing else error_response(_unavailable(missing))

    async def _load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self._api.backend.num_active})

    async def _show_version(self, request: Request) -> Response:
        return JSONResponse({"version": self._version})

    async def _metrics(self, request: Request) -> Response:
        return Response(self._api.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _unavailable(pools: Sequence[str]) -> RequestError:
    return RequestError(503, f"no live {' and no live '.join(pools)} worker", "service_unavailable")
