"""A gateway of the simulated ring: all that the real process has between its sockets and HTTP, and its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Self

from common.errors import RequestError
from common.ids import PeerId, RequestId
from common.links import Links
from common.sampling import Finish, SamplingParams
from common.service import Received, Send
from common.wire import Cancel, Ended, PrefillDone, Tokens, TokensEntry
from gateway.engine import EngineGeneration, GatewayEngine
from gateway.fleet import Fleet
from gateway.life import Phase, Request
from gateway.requests import Effect, Event, Requests
from tests.fakes import MAX_MODEL_LEN
from tests.sim.loop import VirtualLoop
from tests.sim.process import Process
from tests.sim.sockets import owned_by

if TYPE_CHECKING:
    from tests.sim.world import World

LATE_S = 0.5
"""By which an end may miss its deadline: ticks, and what is on its way to the client."""


@dataclass
class Client:
    """One request, and what its client saw.

    expected:  the tokens of the undisturbed model
    has_left:  it does not read any more, or its gateway is gone or about to go
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    expected: list[int]
    gateway: str = ""
    is_poison: bool = False
    arrival_s: float = 0.0
    request_id: RequestId | None = None
    token_ids: list[int] = field(default_factory=list[int])
    num_cached_tokens: int = 0
    finish: Finish | None = None
    error: RequestError | None = None
    ended_s: float = 0.0
    has_left: bool = False

    @property
    def is_ended(self) -> bool:
        return self.has_left or self.finish is not None or self.error is not None

    def take(self, token_ids: tuple[int, ...], finish: Finish | None) -> None:
        assert self.finish is None, f"{self.request_id} heard something after its terminal frame"
        start, end = len(self.token_ids), len(self.token_ids) + len(token_ids)
        assert list(token_ids) == self.expected[start:end], f"{self.request_id}: {token_ids} at {start} is wrong"
        self.token_ids += token_ids
        self.finish = finish
        assert finish is None or end == len(self.expected), f"{self.request_id} ended after {end} tokens"


class Told(NamedTuple):
    """What messages may change of a request."""

    attempt: int
    num_tokens: int
    phase: Phase

    @classmethod
    def of(cls, request: Request) -> Self:
        return cls(request.attempt, len(request.output_token_ids), request.phase)


class CheckedRequests(Requests):
    """Sees to it that messages of other attempts change nothing, and that only who is alive is asked for anything."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(_, PrefillDone() | Ended() as message):
                told = (message,)
            case Received(_, Tokens(entries=entries)):
                told = entries
            case _:
                told = ()
        stale = {entry: request for entry in told if (request := self._of_another_attempt(entry))}
        before = {entry: Told.of(request) for entry, request in stale.items()}
        effects = super().handle(event, now)
        is_all_stale = len(stale) == len(told)
        for entry, request in stale.items():
            after = Told.of(request)
            if not is_all_stale and before[entry].phase is Phase.QUEUED:
                after = after._replace(phase=Phase.QUEUED)  # another entry may end what it was queued behind
            assert before[entry] == after, f"{entry} is stale, and makes {after} of {before[entry]}"
        for effect in effects:
            if isinstance(effect, Send) and not isinstance(effect.message, Cancel):
                assert effect.peer in self.fleet, f"{effect.message} is sent to {effect.peer}, which is not there"
        return effects

    def _of_another_attempt(self, message: PrefillDone | Ended | TokensEntry) -> Request | None:
        request = self._requests.get(message.request_id)
        return request if request and request.attempt != message.attempt else None


class Gateway(Process):
    """One incarnation. Mutable state: its clients, and the tasks that read for them."""

    def __init__(self, world: World, name: str, peer: PeerId) -> None:
        super().__init__(world.clock, name, peer)
        self.world = world
        self.requests = CheckedRequests(Fleet("fake-model", _refuse), world.plan.policy, Random(world.random.random()))
        self._loop = VirtualLoop(self)
        self._readers: list[asyncio.Task[None]] = []
        self.clients: list[Client] = []
        with owned_by(self, world.network):
            self.links = Links(
                *(peer, f"tcp://{name}:1", None),
                lambda worker: self.engine.status_for(worker),
                lambda event: self.engine.deliver(event),
                max(world.plan.max_outbox, 2 * len(world.plan.arrivals)),
            )
        self._loop.run(self._start_engine)

    def _start_engine(self) -> None:
        self.engine = GatewayEngine(
            *(self.peer, self.requests, MAX_MODEL_LEN),
            send=self.links.send,
            is_healthy=lambda: self.links.is_alive,
            address=self.links.address,
        )

    def start(self) -> None:
        self.links.start()

    def submit(self, client: Client, pause_s: float) -> None:
        """A client's request arrives."""
        self.clients.append(client)
        client.arrival_s = self.clock.now
        self.enter(lambda: self._loop.run(self._submit, client, pause_s))

    def _submit(self, client: Client, pause_s: float) -> None:
        try:
            (generation,) = self.engine.submit([(client.prompt, client.sampling)])
        except RequestError as error:
            if error.code != "too_many_requests":
                raise
            client.has_left = True
            return
        client.request_id = generation.request_id
        if client.is_poison:
            self.world.poisons.add(generation.request_id)
        client.arrival_s = self.clock.now
        self._readers.append(self._loop.create_task(self._read(client, generation, pause_s)))
        timeout_s = self.world.plan.policy.request_timeout_s + LATE_S
        self.after(timeout_s, lambda: self.after(LATE_S, lambda: self._check_deadline(client, timeout_s)))

    async def _read(self, client: Client, generation: EngineGeneration, pause_s: float) -> None:
        updates: AsyncIterator[tuple[tuple[int, ...], Finish | None]] = aiter(generation)
        try:
            async for token_ids, finish in updates:
                client.num_cached_tokens = generation.num_cached_tokens
                client.take(token_ids, finish)
                self.world.trace("client of %s: %s %s", generation.request_id, token_ids, finish)
                client.ended_s = self.clock.now
                if client.has_left:
                    generation.cancel()
                elif pause_s:
                    await self._loop.sleep(pause_s)
        except RequestError as error:
            self.world.trace("client of %s: %s", generation.request_id, error)
            client.error = error
            client.ended_s = self.clock.now

    def leave(self, client: Client) -> None:
        """The client closes its connection."""
        client.has_left = True
        self.enter(lambda: self._loop.run(self._cancel, client))

    def _cancel(self, client: Client) -> None:
        if client.request_id and (generation := self.engine._generations.get(client.request_id)):
            generation.cancel()

    def shut_down(self) -> None:
        """It is told to stop: streams end with a terminal frame, and workers are told to drop them."""
        error = RequestError(503, "the gateway is shutting down", type="service_unavailable", retry_after_s=1)
        for client in self.clients:
            client.has_left = True
        self.enter(lambda: self._loop.run(self.engine.fail_all, error))
        self.enter(self._leave)

    def _leave(self) -> None:
        """In one event: no timer runs between the two, whatever else happens."""
        self.links.close(flush_s=0.5)
        self.world.end(self)

    def die(self) -> None:
        super().die()
        for client in self.clients:
            client.has_left = True

    def _check_deadline(self, client: Client, timeout_s: float) -> None:
        is_ended = client.request_id not in self.engine._generations
        assert is_ended, f"{client.request_id} has no terminal frame {timeout_s} s after its arrival"

    def check(self) -> None:
        """Nothing went wrong where nobody would have noticed."""
        if self.engine._broken.done():
            raise self.engine._broken.result()
        for reader in self._readers:
            if reader.done() and (error := reader.exception()):
                raise error
        self._readers = [reader for reader in self._readers if not reader.done()]

    def unrest(self) -> str:
        """What is left here when nothing should be; "" for nothing."""
        if len(self.requests) or self.engine._generations or self._readers:
            return f"{self.peer} still has {len(self.requests)} requests and {len(self._readers)} readers"
        return ""


def _refuse(name: str, problem: str) -> None:
    raise AssertionError(f"{name}: {problem}")
