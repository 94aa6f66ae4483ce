"""Clients on the virtual clock: they send what a plan says, and see what a real client would measure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from bench.measure import RequestFigures
from bench.planning.clock import Clock
from bench.workload import Plan, PlannedRequest
from common.ids import RequestId
from gateway.requests import Emit, Fail


@dataclass(slots=True)
class _Stream:
    """One request and its answer so far. Times are the clock's."""

    request: PlannedRequest
    sent_s: float
    ended_s: float = 0.0
    num_cached: int = 0
    times_s: list[float] = field(default_factory=list[float])
    num_tokens: list[int] = field(default_factory=list[int])
    failure: str = ""


class VirtualClients:
    """All requests of one plan.

    link_s:   from a client to the gateway, and back
    submit:   hands a request to the gateway
    Mutable state: streams by id, and the requests that a closed loop still has to send.
    """

    def __init__(
        self, plan: Plan, clock: Clock, link_s: float, run: str, submit: Callable[[RequestId, PlannedRequest], None]
    ) -> None:
        """run: tells the ids of this run from those of others."""
        self._clock = clock
        self._link_s = link_s
        self._run = run
        self._submit = submit
        self._began_s = clock.now
        self._num_left = len(plan.requests)
        self._streams: dict[RequestId, _Stream] = {}
        self._coming = iter(plan.requests if plan.concurrency else ())
        for _ in range(plan.concurrency or 0):
            self._send_next(clock.now)
        if not plan.concurrency:
            self._send_on_time(plan)

    @property
    def is_done(self) -> bool:
        return self._num_left == 0

    def _send_on_time(self, plan: Plan) -> None:
        for request in plan.requests:
            assert request.send_at_s is not None
            self._send(request, self._began_s + request.send_at_s)

    def _send(self, request: PlannedRequest, sent_s: float) -> None:
        request_id = RequestId(f"{self._run}-{request.spec.index}")
        self._streams[request_id] = _Stream(request, sent_s)
        self._clock.at(sent_s + self._link_s, lambda: self._submit(request_id, request))

    def _send_next(self, sent_s: float) -> None:
        """In a closed loop."""
        if request := next(self._coming, None):
            self._send(request, sent_s)

    def hear(self, effect: Emit | Fail) -> None:
        """What the gateway says now is read one link later."""
        stream, read_s = self._streams[effect.request_id], self._clock.now + self._link_s
        if isinstance(effect, Fail):
            stream.failure = f"HTTP {effect.error.status}"
        elif effect.token_ids:
            stream.times_s.append(read_s)
            stream.num_tokens.append(len(effect.token_ids))
            stream.num_cached = effect.num_cached_tokens
        if isinstance(effect, Fail) or effect.finish:
            stream.ended_s = read_s
            self._num_left -= 1
            self._send_next(read_s)

    def figures(self) -> list[RequestFigures]:
        """In the order of the plan."""
        found = [_figures(stream, self._began_s) for stream in self._streams.values()]
        return sorted(found, key=lambda request: request.index)


def _figures(stream: _Stream, began_s: float) -> RequestFigures:
    spec, times_s, num_output = stream.request.spec, stream.times_s, sum(stream.num_tokens)
    return RequestFigures(
        index=spec.index,
        group=spec.group,
        session=spec.session,
        scheduled_s=stream.request.send_at_s,
        sent_s=stream.sent_s - began_s,
        ended_s=stream.ended_s - began_s,
        event_times_s=tuple(time_s - began_s for time_s in times_s),
        tokens_per_event=tuple(stream.num_tokens),
        num_input=spec.num_input,
        num_output=num_output,
        num_cached=stream.num_cached,
        ttft_s=times_s[0] - stream.sent_s if times_s else None,
        tpot_s=(times_s[-1] - times_s[0]) / (num_output - 1) if num_output > 1 else None,
        e2e_s=stream.ended_s - stream.sent_s,
        longest_gap_s=max((later - earlier for earlier, later in pairwise(times_s)), default=0.0),
        failure=stream.failure,
        detail="",
        mismatch="",
        has_usage=True,
        phases_s={},
    )
