"""One request, and how long it may wait. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from common.errors import RequestError
from common.ids import PeerId, RequestId
from common.kv_source import KVDescriptor
from common.sampling import SamplingParams
from common.wire import Role

RETRY_AFTER_S = 5
"""What clients are told that find no worker: a small model is loaded by then."""


class Phase(StrEnum):
    """Where the current attempt is."""

    QUEUED = "queued"
    PREFILL = "prefill"
    HANDOFF = "handoff"
    DECODE = "decode"
    ENDED = "ended"


@dataclass(slots=True)
class Request:
    """A client's request from submission to its terminal frame.

    Mutable state: output_token_ids is what the client was sent, over all attempts; the rest below
    belongs to the current attempt, but for num_failures, failed_s, failed_transfer, is_doubtful,
    computed_at and num_cached_tokens.

    prefill:           the worker that computes the prompt or holds its KV
    decode:            the worker that pulls the KV, or has it from the beginning, and goes on
    computed_at:       the last worker that had the prompt: it keeps its KV in the cache for the next attempt
    num_cached_tokens: of the prompt, at the first attempt that brought a token
    failed_s:          when the latest failure came that counted or may count; until then, when the request arrived
    failed_transfer:   of the latest failure, from which worker and when; it counts once that worker shows that it lives
    is_doubtful:       its latest worker died or failed it, and none has decoded it since
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    waiting_since_s: float
    failed_s: float
    output_token_ids: list[int] = field(default_factory=list[int])
    attempt: int = 0
    phase: Phase = Phase.QUEUED
    prefill: PeerId | None = None
    decode: PeerId | None = None
    kv: KVDescriptor | None = None
    computed_at: PeerId | None = None
    num_failures: int = 0
    failed_transfer: tuple[PeerId, float] | None = None
    is_doubtful: bool = False
    num_cached_tokens: int = 0

    def is_at(self, peer: PeerId) -> bool:
        return peer in (self.prefill, self.decode)

    def depends_on(self, peer: PeerId) -> bool:
        """The attempt is void without this peer. A pull that is under way tells by itself when it fails."""
        return peer == (self.decode if self.phase is Phase.DECODE else self.prefill)

    def forget(self, peer: PeerId) -> None:
        """The peer holds nothing of this attempt any more."""
        self.prefill = None if self.prefill == peer else self.prefill
        self.decode = None if self.decode == peer else self.decode

    def may_have_killed(self, last_heard_s: float) -> bool:
        """Whether a worker that died with this attempt, and was last heard of then, may have died of it.

        Workers that die at once are learnt of one by one, and each time the request is sent on to another, which may
        be dead already. So one that said nothing since the failure before belongs to the same incident.
        """
        return last_heard_s >= self.failed_s

    def note_failure(self, now: float, *, counts: bool) -> None:
        self.is_doubtful = True
        if counts:
            self.num_failures += 1
            self.failed_s = now

    def begin_next_attempt(self, now: float) -> None:
        self.attempt += 1
        self.phase = Phase.QUEUED
        self.prefill = self.decode = self.kv = None
        self.waiting_since_s = now


@dataclass(frozen=True, slots=True, kw_only=True)
class LifePolicy:
    """Limits on a gateway's requests. Times in seconds.

    request_timeout_s:    from arrival to the terminal frame
    when_no_prefill:      whether a request without a token waits for a prefill worker, or is refused at once
    no_worker_timeout_s:  wait of a request without a token for a pool without a worker
    resume_timeout_s:     the same wait in mid-stream
    max_attempts:         failed attempts of one request: deaths of a worker that it may have caused, transfers that
                          did not work from a worker that lives; not preemption and draining
    """

    max_concurrent_requests: int
    request_timeout_s: float
    when_no_prefill: Literal["queue", "reject"]
    no_worker_timeout_s: float
    resume_timeout_s: float
    max_attempts: int

    def is_on_trial(self, request: Request) -> bool:
        """Whether the next failure is the request's last, and nothing speaks for it.

        No other doubtful request of this gateway is under way then, and only doubtful ones are blamed for what their
        worker dies of. So a request that kills whoever runs it ends, and those that were with it go on.
        """
        return request.is_doubtful and request.num_failures == self.max_attempts - 1

    def refuse_to_wait(self, request: Request, missing_pools: list[str]) -> RequestError | None:
        """The error that ends this request, which no worker can take now; None when it may wait."""
        if self.when_no_prefill == "queue" or request.output_token_ids or Role.PREFILL not in missing_pools:
            return None
        return _no_worker("no live prefill worker")

    def overdue(self, request: Request, missing_pools: list[str], now: float) -> RequestError | None:
        """The error that ends this request now, if its time is up."""
        if now - request.arrival_s > self.request_timeout_s:
            message = f"the request did not end within {self.request_timeout_s:g} s"
            return RequestError(504, message, type="timeout_error", code="request_timeout")
        if request.phase not in (Phase.QUEUED, Phase.HANDOFF):
            return None
        if request.phase is Phase.QUEUED and not missing_pools:
            return None  # it waits for its turn
        limit_s = self.resume_timeout_s if request.output_token_ids else self.no_worker_timeout_s
        if now - request.waiting_since_s <= limit_s:
            return None
        return _no_worker(f"no live {' and no live '.join(missing_pools) or 'matching'} worker for {limit_s:g} s")


def _no_worker(message: str) -> RequestError:
    return RequestError(503, message, type="service_unavailable", code="no_worker", retry_after_s=RETRY_AFTER_S)
