"""The real backend: drives `Requests` with real links on the asyncio loop, and hands tokens to HTTP handlers."""

import asyncio
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from common.errors import BatonError, RequestError
from common.ids import PeerId, RequestId
from common.sampling import SamplingParams
from common.service import TICK_S, LinkEvent, LinkFull, Send, Tick
from common.wire import Control, GatewayStatus, WorkerStatus
from gateway.backend import Update
from gateway.requests import Abort, Emit, Event, Fail, Requests, Submit

logger = logging.getLogger(__name__)


class EngineGeneration:
    """One sequence under way, iterated by one handler.

    Mutable state: updates not taken yet (a slow reader finds them merged), the error that ends it, and the handler's
    wait for either.
    """

    def __init__(self, request_id: RequestId, abort: Callable[[RequestId], None]) -> None:
        self.request_id = request_id
        self.num_cached_tokens = 0
        self._abort = abort
        self._pending: Update | None = None
        self._error: RequestError | None = None
        self._is_ended = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> "EngineGeneration":
        return self

    async def __anext__(self) -> Update:
        if self._pending is None and not self._is_ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._pending is None:
            if self._error is not None:
                raise self._error
            raise StopAsyncIteration
        update, self._pending = self._pending, None
        return update

    def cancel(self) -> None:
        if not self._is_ended:
            self._end()
            self._abort(self.request_id)

    def push(self, emit: Emit) -> None:
        old = self._pending.token_ids if self._pending else ()
        self.num_cached_tokens = emit.num_cached_tokens
        self._pending = Update(old + emit.token_ids, emit.finish)
        if emit.finish:
            self._is_ended = True
        self._wake()

    def fail(self, error: RequestError) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self._is_ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class GatewayEngine:
    """All generations of this gateway. Owned by the event loop's thread, but for `deliver` and `status_for`.

    model_limit: tokens of the model's context
    is_healthy:  False when a thread that the engine depends on has died
    Mutable state: the pure `Requests`, generations by id, events from the links' thread, and whether it is broken.
    """

    def __init__(
        self,
        peer: PeerId,
        requests: Requests,
        model_limit: int,
        *,
        send: Callable[[PeerId, Control], bool],
        is_healthy: Callable[[], bool],
        address: str,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._peer = peer
        self._requests = requests
        self._model_limit = model_limit
        self._send = send
        self._is_healthy = is_healthy
        self.address = address
        self._ids = itertools.count()
        self._generations: dict[RequestId, EngineGeneration] = {}
        self._arrived: deque[LinkEvent] = deque()
        self._statuses: dict[PeerId, GatewayStatus] = {}
        self._pools_are_live = asyncio.Event()
        self._broken: asyncio.Future[Exception] = self._loop.create_future()
        self._loop.call_later(TICK_S, self._tick)

    @property
    def max_context(self) -> int:
        return self._requests.fleet.max_context(self._model_limit)

    @property
    def num_active(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        return self._requests.num_waiting

    def totals(self) -> Mapping[str, int]:
        return self._requests.totals

    def missing_pools(self) -> list[str]:
        return self._requests.fleet.missing_pools()

    def workers(self) -> Mapping[str, WorkerStatus]:
        return {worker.status.name: worker.status for worker in self._requests.fleet.all()}

    async def wait_for_pools(self) -> None:
        """Return once every pool has had a live worker."""
        await self._pools_are_live.wait()

    async def watch(self) -> NoReturn:
        """Wait until it is broken, which only a bug of ours can do. Whoever started the process starts it again.

        Raises: BatonError.
        """
        error = await self._broken
        raise BatonError(f"the gateway's engine is broken: {error}") from error

    def submit(self, prompts: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[EngineGeneration]:
        self._requests.check_admission(len(prompts))
        generations = [EngineGeneration(self._new_id(), self._abort) for _ in prompts]
        for generation, (prompt, sampling) in zip(generations, prompts, strict=True):
            self._generations[generation.request_id] = generation
            self._handle(Submit(generation.request_id, tuple(prompt), sampling))
        return generations

    def _new_id(self) -> RequestId:
        return RequestId(f"{self._peer}-{next(self._ids)}")

    def _abort(self, request_id: RequestId) -> None:
        self._generations.pop(request_id, None)
        self._handle(Abort(request_id))

    def fail_all(self, error: RequestError) -> None:
        """End every generation with this error, and drop it at the workers."""
        for request_id, generation in list(self._generations.items()):
            self._abort(request_id)
            generation.fail(error)

    def deliver(self, event: LinkEvent) -> None:
        """Hand in an event of the links. Any thread; several that come close together wake the loop once."""
        self._arrived.append(event)
        if len(self._arrived) == 1:
            self._loop.call_soon_threadsafe(self._guard, self._take_arrived)

    def _take_arrived(self) -> None:
        while self._arrived:
            self._handle(self._arrived[0])
            self._arrived.popleft()

    def _guard(self, work: Callable[[], None]) -> None:
        """What the loop calls by itself has no caller who would notice that it failed."""
        try:
            work()
        except Exception as error:
            if not self._broken.done():
                self._broken.set_result(error)

    def status_for(self, peer: PeerId | None) -> GatewayStatus:
        """What to tell a worker. Any thread."""
        known = self._statuses.get(peer) if peer else None
        return known or GatewayStatus(name=self._peer, address=self.address, leases=())

    def _tick(self) -> None:
        self._guard(self._let_time_pass)
        self._loop.call_later(TICK_S, self._tick)

    def _let_time_pass(self) -> None:
        if not self._is_healthy():
            raise BatonError("a thread has died, see the log above")
        self._handle(Tick())
        self._statuses = {
            worker.peer: GatewayStatus(name=self._peer, address=self.address, leases=self._requests.leases(worker.peer))
            for worker in self._requests.fleet.all()
        }

    def _handle(self, event: Event) -> None:
        """What a full link refuses comes after all that the event brought: no error overtakes tokens."""
        events = deque([event])
        while events:
            for effect in self._requests.handle(events.popleft(), self._loop.time()):
                match effect:
                    case Send(peer, message):
                        if not self._send(peer, message):
                            events.append(LinkFull(peer, message))
                    case Emit(request_id):
                        self._emit(request_id, effect)
                    case Fail(request_id, error):
                        logger.warning("%s failed: %s", request_id, error)
                        if generation := self._generations.pop(request_id, None):
                            generation.fail(error)
        if not self._pools_are_live.is_set() and not self.missing_pools():
            self._pools_are_live.set()

    def _emit(self, request_id: RequestId, emit: Emit) -> None:
        if generation := self._generations.get(request_id):
            generation.push(emit)
        if emit.finish:
            self._generations.pop(request_id, None)


def new_peer_id(name: str) -> PeerId:
    """This incarnation of the service."""
    return PeerId(f"{name}#{secrets.token_hex(4)}")
