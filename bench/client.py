"""The HTTP client: sends what a plan says, and keeps what comes, unread.

It shares its machine with the server more often than not, so whatever can wait until the requests have ended does:
bodies are encoded before, events are parsed after.
"""

import asyncio
import contextlib
import gc
import resource
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator

import aiohttp
import msgspec

from bench.exchange import STOPPED, BenchError, Exchange, Outcome, Server
from bench.workload import Plan, PlannedRequest

_CONNECT_TIMEOUT_S = 5.0
_KEEPALIVE_S = 2.0
"""A connection idle for longer is not used again: below what servers close theirs after (uvicorn: 5 s)."""


Coming = Iterator[tuple[PlannedRequest, bytes]]
Send = Callable[[PlannedRequest, bytes], Coroutine[None, None, None]]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Client:
    """stop: set by Ctrl-C; requests under way are then dropped, and no more are sent."""

    def __init__(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        self._session = session
        self._stop = stop

    async def find_model(self, url: str) -> str:
        """The first model that a server lists. Raises: BenchError."""
        try:
            async with self._session.get(f"{url}/v1/models") as answer:
                body = await answer.read()
                if answer.status != 200:
                    raise BenchError(f"{url}/v1/models: HTTP {answer.status}: {body[:200].decode(errors='replace')}")
                models = msgspec.json.decode(body, type=_Models).data
        except aiohttp.ClientConnectorError as error:
            raise BenchError(f"cannot reach {url}: {error.os_error}; is it running, and is --url right?") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchError(f"cannot reach {url}: {type(error).__name__}: {error}") from error
        except msgspec.DecodeError as error:
            raise BenchError(f"{url}/v1/models does not list models: {error}") from error
        if not models:
            raise BenchError(f"{url} serves no model")
        return models[0].id

    async def run(self, server: Server, plan: Plan, on_end: Callable[[], None]) -> Outcome:
        """Carry the plan out. on_end: called at the end of each request."""
        bodies = [_encode_body(request, server.model) for request in plan.requests]
        exchanges: list[Exchange] = []

        async def send(request: PlannedRequest, body: bytes) -> None:
            exchange = Exchange(request)
            exchanges.append(exchange)
            path = "/v1/chat/completions" if isinstance(request.prompt, str) else "/v1/completions"
            await self._exchange(server.url + path, body, exchange)
            on_end()

        with _no_garbage_collection():
            cpu_s, started_s = _cpu_seconds(), time.perf_counter()
            coming = zip(plan.requests, bodies, strict=True)
            if plan.concurrency is None:
                driver = self._send_on_time(coming, send, started_s)
            else:
                driver = self._send_in_turn(coming, send, plan.concurrency)
            await self._until_stopped(driver)
            return Outcome(exchanges, started_s, time.perf_counter(), _cpu_seconds() - cpu_s)

    async def _send_in_turn(self, coming: Coming, send: Send, concurrency: int) -> None:
        async def one_lane() -> None:
            for request, body in coming:  # shared: each lane takes what is next
                await send(request, body)

        async with asyncio.TaskGroup() as lanes:
            for _ in range(concurrency):
                lanes.create_task(one_lane())

    async def _send_on_time(self, coming: Coming, send: Send, started_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for request, body in coming:
                assert request.send_at_s is not None
                # Again where it woke early: uvloop's timers count milliseconds.
                while (wait_s := started_s + request.send_at_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                tasks.create_task(send(request, body))

    async def _until_stopped(self, driver: Coroutine[None, None, None]) -> None:
        """Run the driver; on Ctrl-C cancel it with all its requests."""
        driving = asyncio.ensure_future(driver)
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((driving, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not driving.done():
            driving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await driving

    async def _exchange(self, url: str, body: bytes, exchange: Exchange) -> None:
        chunks, clock = exchange.chunks, time.perf_counter
        exchange.sent_s = clock()
        try:
            async with self._session.post(url, data=body) as answer:
                exchange.status = answer.status
                async for received in answer.content.iter_any():
                    chunks.append((clock(), received))
        except asyncio.CancelledError:
            exchange.failure = STOPPED
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            exchange.failure, exchange.detail = _kind_of(error), f"{type(error).__name__}: {error}"
        finally:
            exchange.ended_s = clock()


@contextlib.asynccontextmanager
async def open_client(timeout_s: float, api_key: str, stop: asyncio.Event) -> AsyncGenerator[Client]:
    """A client with as many connections as it has requests. timeout_s: of one request."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S),
        headers=headers,
    ) as session:
        yield Client(session, stop)


def _encode_body(request: PlannedRequest, model: str) -> bytes:
    """The answer's length is fixed: no server stops at an EOS that another does not draw."""
    prompt = request.prompt
    question = {"messages": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else {"prompt": prompt}
    return msgspec.json.encode(
        {
            "model": model,
            **question,
            "max_tokens": request.spec.num_output,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,  # a token without text is one that cannot be timed
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def _kind_of(error: aiohttp.ClientError | TimeoutError) -> str:
    match error:
        case TimeoutError():
            return "timeout"
        case aiohttp.ClientConnectorError():
            return "cannot connect"
        case aiohttp.ClientPayloadError() | aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
            return "connection lost"
        case _:
            return type(error).__name__


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def _no_garbage_collection() -> Generator[None]:
    """A collection over all the chunks would stop the clock for every stream, and look like the server's gap."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
