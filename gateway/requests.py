"""The life of every request of one gateway: attempts, order, resume, the one terminal frame. Pure.

    QUEUED ──PrefillRequest──► PREFILL ──PrefillDone──► HANDOFF ──DecodeRequest──► DECODE ──► end
       ▲                          │                        │                          │
       └────────── the next attempt: a death, a lost link, preemption, draining ──────┘

A worker that does both takes its request from PREFILL to DECODE with PrefillDone.
QUEUED and HANDOFF wait for a worker. Every other way out is an end: finished, failed, or aborted by the client.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from common.errors import RequestError
from common.ids import PeerId, RequestId
from common.sampling import Finish, SamplingParams
from common.service import LinkEvent, LinkFull, LinkLost, Received, Send, Tick
from common.wire import (
    Cancel,
    DecodeRequest,
    Ended,
    EndReason,
    PrefillDone,
    PrefillRequest,
    Tokens,
    TokensEntry,
    WorkerStatus,
)
from gateway.fleet import Fleet, Worker
from gateway.life import LifePolicy, Phase, Request
from gateway.router import pick_decode, pick_prefill

NOBODYS_FAULT = frozenset({EndReason.PREEMPTED, EndReason.DRAINING})
"""Ends that do not count against a request."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Event: a client's request, validated and tokenized, with an id that was never used before."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Abort:
    """Event: the client left, or its stop string was found. Unknown ids are fine."""

    request_id: RequestId


class Emit(NamedTuple):
    """Effect: new tokens for the client, following those before. With finish it is the terminal frame."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    finish: Finish | None
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Effect: the terminal frame of a request that cannot be completed."""

    request_id: RequestId
    error: RequestError


Event = LinkEvent | Tick | Submit | Abort
Effect = Send | Emit | Fail


class Requests:
    """All requests of one gateway that have not ended.

    random: chooses among workers that are as good as equal
    Mutable state: the requests by id, the fleet, and totals for /metrics.
    """

    def __init__(self, fleet: Fleet, policy: LifePolicy, random: Random) -> None:
        self.fleet = fleet
        self._policy = policy
        self._random = random
        self._requests: dict[RequestId, Request] = {}
        self.totals = {"retries": 0, "stale_messages": 0}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests without a first token."""
        return sum(not request.output_token_ids for request in self._requests.values())

    def check_admission(self, count: int) -> None:
        """Raises: RequestError 429 when `count` more requests are too many."""
        limit = self._policy.max_concurrent_requests
        if len(self._requests) + count > limit:
            message = f"{len(self._requests)} requests are under way, {count} more would pass the limit of {limit}"
            raise RequestError(429, message, type="rate_limit_error", code="too_many_requests", retry_after_s=1)

    def leases(self, peer: PeerId) -> tuple[tuple[RequestId, int], ...]:
        """Requests for whose handoff, or whose next attempt, the KV that this worker has computed is still wanted."""
        return tuple(
            (r.request_id, r.attempt) for r in self._requests.values() if r.computed_at == peer and r.decode != peer
        )

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Submit():
                return self._submit(event, now)
            case Abort(request_id):
                return self._abort(request_id)
            case Received(peer, message):
                self.fleet.heard(peer, now)
                return self._receive(peer, message, now)
            case LinkLost(peer, reason):
                return self._lose(self.fleet.remove(peer, now), reason, now)
            case LinkFull(peer, _):
                return self._lose(self.fleet.remove(peer, now), "the worker does not read", now)
            case Tick():
                return self._tick(now)

    def _submit(self, event: Submit, now: float) -> list[Effect]:
        assert event.request_id not in self._requests
        request = Request(
            request_id=event.request_id,
            prompt_token_ids=event.prompt_token_ids,
            sampling=event.sampling,
            arrival_s=now,
            waiting_since_s=now,
            failed_s=now,
        )
        self._requests[request.request_id] = request
        return self._route(request, now)

    def _abort(self, request_id: RequestId) -> list[Effect]:
        request = self._requests.pop(request_id, None)
        return list(self._cancel(request)) if request else []

    def _cancel(self, request: Request) -> Iterable[Send]:
        """Drop the current attempt wherever it is."""
        message = Cancel(request_id=request.request_id, attempt=request.attempt)
        for peer in (request.prefill, request.decode):
            if peer is not None and peer in self.fleet:
                yield Send(peer, message)

    def _receive(self, peer: PeerId, message: object, now: float) -> list[Effect]:
        match message:
            case WorkerStatus():
                self.fleet.observe(peer, message, now)
                return self._route_waiting(now)
            case PrefillDone():
                return self._prefill_done(peer, message, now)
            case Tokens(entries=entries):
                return [effect for entry in entries for effect in self._tokens(peer, entry, now)]
            case Ended():
                return self._ended(peer, message, now)
            case _:
                return []

    def _current(self, peer: PeerId, message: PrefillDone | TokensEntry | Ended) -> Request | None:
        """The request whose current attempt is at this peer; None when the message is stale."""
        request = self._requests.get(message.request_id)
        if request and request.attempt == message.attempt and request.is_at(peer):
            return request
        self.totals["stale_messages"] += 1
        return None

    def _prefill_done(self, peer: PeerId, done: PrefillDone, now: float) -> list[Effect]:
        request = self._current(peer, done)
        if request is None:
            return [Send(peer, Cancel(request_id=done.request_id, attempt=done.attempt))]
        if request.phase is not Phase.PREFILL:  # said twice: a cancel would drop the very handoff that is wanted
            return []
        if done.index != len(request.output_token_ids):
            return self._fail_attempt(
                request, f"token {done.index} came, {len(request.output_token_ids)} was next", now
            )
        if not (done.finish_reason or done.kv or self.fleet.goes_on(peer)):
            return self._fail_attempt(request, "prefill reported neither an end nor KV", now)
        if not request.output_token_ids:
            request.num_cached_tokens = done.num_cached_tokens
        if done.kv:
            request.phase, request.kv, request.waiting_since_s = Phase.HANDOFF, done.kv, now
        else:
            request.phase, request.prefill, request.decode = Phase.DECODE, None, peer
        finish = Finish(done.finish_reason, done.stop_token_id) if done.finish_reason else None
        return [*self._emit(request, (done.token_id,), finish), *self._route(request, now)]

    def _tokens(self, peer: PeerId, entry: TokensEntry, now: float) -> list[Effect]:
        request = self._current(peer, entry)
        if request is None or request.phase is not Phase.DECODE:
            return [Send(peer, Cancel(request_id=entry.request_id, attempt=entry.attempt))]
        request.prefill = None  # its first token proves that decode pulled and released the KV
        num_known = len(request.output_token_ids) - entry.index
        if num_known < 0:
            return self._fail_attempt(
                request, f"token {entry.index} came, {len(request.output_token_ids)} was next", now
            )
        finish = Finish(entry.finish_reason, entry.stop_token_id) if entry.finish_reason else None
        effects = self._emit(request, entry.token_ids[num_known:], finish)
        if request.is_doubtful:  # not any more, and others may have waited for that
            request.is_doubtful = False
            effects += self._route_waiting(now)
        return effects

    def _emit(self, request: Request, token_ids: tuple[int, ...], finish: Finish | None) -> list[Effect]:
        if not token_ids and not finish:
            return []
        request.output_token_ids += token_ids
        if finish:
            request.phase = Phase.ENDED
            del self._requests[request.request_id]
        return [Emit(request.request_id, token_ids, finish, request.num_cached_tokens)]

    def _ended(self, peer: PeerId, ended: Ended, now: float) -> list[Effect]:
        if ended.reason is EndReason.DRAINING:
            self.fleet.note_draining(peer)
        request = self._current(peer, ended)
        if request is None:
            return []
        match ended.reason:
            case EndReason.TOO_LARGE:
                return self._fail(request, RequestError(400, ended.detail, code="context_length_exceeded"))
            case EndReason.REFUSED:
                return self._fail(request, RequestError(400, ended.detail))
            case EndReason.FAILED:
                return self._fail(request, RequestError(500, ended.detail, type="internal_server_error"))
            case EndReason.TRANSFER:
                return self._transfer_failed(peer, request, ended.detail, now)
            case _:
                needed = request.depends_on(peer)
                request.forget(peer)
                next_attempt = self._retry if ended.reason in NOBODYS_FAULT else self._fail_attempt
                return next_attempt(request, ended.detail, now) if needed else []

    def _lose(self, worker: Worker | None, reason: str, now: float) -> list[Effect]:
        """A worker died or messages between us were lost: what it had of ours goes to its next attempt.

        None: it was lost before, and nothing was sent to it since.
        """
        if worker is None:
            return []
        lost = [request for request in self._requests.values() if request.depends_on(worker.peer)]
        blamed = [request for request in lost if request.is_doubtful] or lost
        counted = {r.request_id for r in blamed if not worker.is_back and r.may_have_killed(worker.last_heard_s)}
        for request in lost:
            self._note_failure(request, now, counts=request.request_id in counted)
        return [effect for request in lost for effect in self._retry(request, reason, now)]

    def _transfer_failed(self, peer: PeerId, request: Request, reason: str, now: float) -> list[Effect]:
        """If the source has died, which may be learnt of later, the request has nothing to do with it."""
        source = request.kv.source.peer if request.kv else peer
        request.forget(peer)
        self._note_failure(request, now, counts=False)
        request.failed_s, request.failed_transfer = now, (source, now)
        return self._retry(request, reason, now)

    def _fail_attempt(self, request: Request, reason: str, now: float) -> list[Effect]:
        self._note_failure(request, now, counts=True)
        return self._retry(request, reason, now)

    def _note_failure(self, request: Request, now: float, *, counts: bool) -> None:
        """A transfer that failed before counts by now if its source was heard of since."""
        if request.failed_transfer:
            source, failed_s = request.failed_transfer
            worker = self.fleet.get(source)
            request.num_failures += worker is not None and worker.last_heard_s > failed_s
            request.failed_transfer = None
        request.note_failure(now, counts=counts)

    def _retry(self, request: Request, reason: str, now: float) -> list[Effect]:
        """The one way to go on after anything: drop this attempt, start the next from the tokens so far."""
        self.totals["retries"] += 1
        if request.num_failures >= self._policy.max_attempts:
            message = f"gave up after {request.num_failures} attempts, the last one ended with: {reason}"
            error = RequestError(500, message, type="internal_server_error", code="too_many_attempts")
            return self._fail(request, error)
        effects: list[Effect] = [*self._cancel(request)]
        request.begin_next_attempt(now)
        return [*effects, *self._route(request, now)]

    def _fail(self, request: Request, error: RequestError) -> list[Effect]:
        request.phase = Phase.ENDED
        del self._requests[request.request_id]
        return [*self._cancel(request), Fail(request.request_id, error)]

    def _route_waiting(self, now: float) -> list[Effect]:
        """Send what waits for a worker: resumed requests first, then the oldest."""
        waiting = [r for r in self._requests.values() if r.phase in (Phase.QUEUED, Phase.HANDOFF)]
        waiting.sort(key=lambda r: (r.attempt == 0, r.arrival_s))
        return [effect for request in waiting for effect in self._route(request, now)]

    def _route(self, request: Request, now: float) -> list[Effect]:
        if request.phase is Phase.QUEUED:
            return [] if self._waits_its_turn(request) else self._send_to_prefill(request, now)
        return self._send_to_decode(request, now) if request.phase is Phase.HANDOFF else []

    def _waits_its_turn(self, request: Request) -> bool:
        """Whether it must not be under way beside another doubtful request. See `LifePolicy.is_on_trial`."""
        if not request.is_doubtful:
            return False
        under_way = (r for r in self._requests.values() if r.is_doubtful and r.phase is not Phase.QUEUED)
        if self._policy.is_on_trial(request):
            return next(under_way, None) is not None
        return any(map(self._policy.is_on_trial, under_way))

    def _send_to_prefill(self, request: Request, now: float) -> list[Effect]:
        workers = self.fleet.prompt_workers()
        if not workers:
            refusal = self._policy.refuse_to_wait(request, self.fleet.missing_pools())
            return self._fail(request, refusal) if refusal else []
        token_ids = (*request.prompt_token_ids, *request.output_token_ids)
        worker = pick_prefill(workers, token_ids, request.computed_at, self._random)
        request.phase, request.prefill, request.computed_at = Phase.PREFILL, worker.peer, worker.peer
        message = PrefillRequest(
            request_id=request.request_id,
            attempt=request.attempt,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=tuple(request.output_token_ids),
            sampling=request.sampling,
            age_s=now - request.arrival_s,
        )
        return [Send(worker.peer, message)]

    def _send_to_decode(self, request: Request, now: float) -> list[Effect]:
        assert request.kv is not None
        workers = self.fleet.matching(request.kv.source.layout)
        if not workers:
            return []
        worker = pick_decode(workers, len(request.kv.block_ids), self._random)
        request.phase, request.decode = Phase.DECODE, worker.peer
        message = DecodeRequest(
            request_id=request.request_id,
            attempt=request.attempt,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=tuple(request.output_token_ids),
            sampling=request.sampling,
            age_s=now - request.arrival_s,
            kv=request.kv,
        )
        return [Send(worker.peer, message)]

    def _tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for worker in self.fleet.pop_silent(now):
            effects += self._lose(worker, "the worker was silent for too long", now)
        missing = self.fleet.missing_pools()
        for request in list(self._requests.values()):
            if error := self._policy.overdue(request, missing, now):
                effects += self._fail(request, error)
        return [*effects, *self._route_waiting(now)]
