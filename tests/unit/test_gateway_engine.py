"""The asyncio shell around a gateway's requests: what readers, links and the operator notice of it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random

import pytest

from common.errors import BatonError, RequestError
from common.ids import PeerId
from common.sampling import Finish, FinishReason, SamplingParams
from common.service import LinkEvent, LinkLost, Received
from common.wire import Cancel, Control, DecodeRequest, Ended, EndReason, PrefillRequest, Role, Tokens
from gateway.backend import Update
from gateway.engine import EngineGeneration, GatewayEngine
from gateway.fleet import Fleet
from gateway.requests import Effect, Event, Requests
from tests.fakes import expected_tokens
from tests.unit.requests_rig import D0, GREEDY, P0, POLICY, PROMPT, prefill_done, status, tokens


class Rig:
    """An engine whose links the test plays."""

    def __init__(self, requests_type: type[Requests] = Requests) -> None:
        self.sent: list[tuple[PeerId, Control]] = []
        self.full: set[PeerId] = set()
        self.is_healthy = True
        policy = replace(POLICY, max_concurrent_requests=2)
        self.requests = requests_type(Fleet("fake-model", lambda name, reason: None), policy, Random(0))
        self.engine = GatewayEngine(
            PeerId("g#1"),
            self.requests,
            1000,
            send=self._send,
            is_healthy=lambda: self.is_healthy,
            address="tcp://gateway:1",
        )

    def _send(self, peer: PeerId, message: Control) -> bool:
        if peer in self.full:
            return False
        self.sent.append((peer, message))
        return True

    async def hear(self, *events: LinkEvent) -> None:
        """Returns once the engine has taken them."""
        for event in events:
            self.engine.deliver(event)
        await asyncio.sleep(0)

    async def join(self) -> None:
        await self.hear(*(Received(peer, status(peer, role)) for peer, role in ((P0, Role.PREFILL), (D0, Role.DECODE))))
        await asyncio.wait_for(self.engine.wait_for_pools(), 5)

    async def prefill(self) -> DecodeRequest:
        """Answer the last prompt, and return what decode is asked for."""
        request = self.sent[-1][1]
        assert isinstance(request, PrefillRequest)
        await self.hear(Received(P0, prefill_done(request, P0)))
        last = self.sent[-1][1]
        assert isinstance(last, DecodeRequest)
        return last

    def submit(self, sampling: SamplingParams = GREEDY) -> EngineGeneration:
        (generation,) = self.engine.submit([(PROMPT, sampling)])
        return generation


def play(scenario: Callable[[Rig], Awaitable[None]]) -> None:
    async def main() -> None:
        rig = Rig()
        await rig.join()
        await scenario(rig)

    asyncio.run(main())


def test_a_slow_reader_finds_its_tokens_merged() -> None:
    async def scenario(rig: Rig) -> None:
        generation = rig.submit()
        request = await rig.prefill()
        for index in range(1, GREEDY.max_tokens):
            await rig.hear(Received(D0, Tokens(entries=(tokens(request, index, 1),))))
        output = tuple(expected_tokens(PROMPT, GREEDY))
        assert [update async for update in generation] == [Update(output, Finish(FinishReason.LENGTH))]
        assert [update async for update in generation] == []

    play(scenario)


def test_a_waiting_reader_gets_each_token_as_it_comes() -> None:
    async def scenario(rig: Rig) -> None:
        generation = rig.submit()
        reader = asyncio.create_task(anext(generation))
        await asyncio.sleep(0)
        request = await rig.prefill()
        first, *rest = expected_tokens(PROMPT, GREEDY)
        assert await reader == Update((first,), None)
        await rig.hear(Received(D0, Tokens(entries=(tokens(request, 1, 2),))))
        assert await anext(generation) == Update(tuple(rest[:2]), None)

    play(scenario)


def test_tokens_come_before_the_error_that_ends_them() -> None:
    async def scenario(rig: Rig) -> None:
        generation = rig.submit()
        request = await rig.prefill()
        failed = Ended(request_id=request.request_id, attempt=0, reason=EndReason.FAILED, detail="not finite")
        await rig.hear(Received(D0, failed))
        assert len((await anext(generation)).token_ids) == 1
        for _ in range(2):
            with pytest.raises(RequestError, match="not finite"):
                await anext(generation)
        assert rig.engine.num_active == 0

    play(scenario)


def test_a_cancel_drops_the_request_at_both_workers_once() -> None:
    async def scenario(rig: Rig) -> None:
        generation = rig.submit()
        await rig.prefill()
        rig.sent.clear()
        generation.cancel()
        generation.cancel()
        assert sorted(peer for peer, message in rig.sent if isinstance(message, Cancel)) == [D0, P0]
        assert rig.engine.num_active == 0

    play(scenario)


def test_a_cancel_after_the_end_does_nothing() -> None:
    async def scenario(rig: Rig) -> None:
        generation = rig.submit(replace(GREEDY, max_tokens=1))
        request = rig.sent[-1][1]
        assert isinstance(request, PrefillRequest)
        await rig.hear(Received(P0, prefill_done(request, P0)))
        rig.sent.clear()
        generation.cancel()
        assert rig.sent == []
        assert len([update async for update in generation]) == 1

    play(scenario)


def test_a_reader_of_a_cancelled_request_is_let_go() -> None:
    async def scenario(rig: Rig) -> None:
        generation = rig.submit()
        reader = asyncio.create_task(anext(generation, None))
        await asyncio.sleep(0)
        generation.cancel()
        assert await asyncio.wait_for(reader, 5) is None

    play(scenario)


def test_too_many_requests_are_refused_all_together() -> None:
    async def scenario(rig: Rig) -> None:
        rig.submit()
        with pytest.raises(RequestError) as refusal:
            rig.engine.submit([(PROMPT, GREEDY), (PROMPT, GREEDY)])
        assert (refusal.value.status, refusal.value.retry_after_s) == (429, 1)
        assert rig.engine.num_active == 1
        rig.submit()

    play(scenario)


def test_a_full_link_fails_no_reader_before_its_tokens() -> None:
    """The cancel of a stale entry finds the link full; the token beside it came, and its reader must see it."""

    async def scenario(rig: Rig) -> None:
        generation = rig.submit()
        request = await rig.prefill()
        rig.requests._policy = replace(POLICY, max_attempts=1)  # pyright: ignore[reportPrivateUsage]
        rig.full = {D0}
        stale, good = replace(tokens(request, 1, 1), attempt=7), tokens(request, 1, 1)
        await rig.hear(Received(D0, Tokens(entries=(stale, good))))
        assert (await anext(generation)).token_ids == tuple(expected_tokens(PROMPT, GREEDY)[:2])
        with pytest.raises(RequestError, match="does not read"):
            await anext(generation)

    play(scenario)


def test_all_readers_are_told_when_the_gateway_stops() -> None:
    async def scenario(rig: Rig) -> None:
        generations = [rig.submit(), rig.submit()]
        rig.engine.fail_all(RequestError(503, "stopping"))
        for generation in generations:
            with pytest.raises(RequestError, match="stopping"):
                await anext(generation)
        assert rig.engine.num_active == 0

    play(scenario)


def test_a_lost_worker_makes_the_gateway_unready_and_a_new_one_ready_again() -> None:
    async def scenario(rig: Rig) -> None:
        assert (rig.engine.max_context, rig.engine.missing_pools()) == (400, [])
        assert set(rig.engine.workers()) == {"p0", "d0"}
        await rig.hear(LinkLost(D0, "broken"))
        assert (rig.engine.max_context, rig.engine.missing_pools()) == (400, ["decode"])
        await rig.join()
        assert rig.engine.missing_pools() == []

    play(scenario)


def test_the_worker_that_holds_a_handoff_is_told_that_it_is_wanted() -> None:
    async def scenario(rig: Rig) -> None:
        rig.submit()
        request = await rig.prefill()
        async with asyncio.timeout(5):
            while not rig.engine.status_for(P0).leases:
                await asyncio.sleep(0.01)  # a status is made anew at every tick
        assert rig.engine.status_for(P0).leases == ((request.request_id, 0),)
        assert rig.engine.status_for(None).leases == ()

    play(scenario)


def test_a_dead_thread_of_the_links_breaks_the_engine() -> None:
    async def scenario(rig: Rig) -> None:
        rig.is_healthy = False
        with pytest.raises(BatonError, match="thread has died"):
            await asyncio.wait_for(rig.engine.watch(), 5)

    play(scenario)


class BrokenRequests(Requests):
    def handle(self, event: Event, now: float) -> list[Effect]:
        raise AssertionError("a bug of ours")


def test_a_bug_in_what_nobody_called_breaks_the_engine() -> None:
    async def main() -> None:
        rig = Rig(BrokenRequests)
        await rig.hear(LinkLost(D0, "broken"))
        with pytest.raises(BatonError, match="a bug of ours"):
            await asyncio.wait_for(rig.engine.watch(), 5)

    asyncio.run(main())
