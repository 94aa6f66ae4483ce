"""A worker on the virtual clock: a real service, and a step's time in place of what a model would compute."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from bench.planning.clock import Clock
from bench.planning.host import Host, StepTime
from common.engine.pacing import Pacer
from common.engine.step import StepPlan, StepResult
from common.engine.worker import WorkerService
from common.ids import PeerId
from common.service import TICK_S, LinkEvent, Send, Tick
from common.wire import Control, WorkerStatus

_TOKEN_ID = 0
"""Of every token of every answer: what is drawn makes no difference to how long it takes."""
_CHECKSUMS = (0,)
"""Of the one KV head of a block that nobody writes."""

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")


class VirtualWorker(Generic[EventT, EffectT]):
    """Does what `WorkerLoop` does: events are handled between two steps.

    time_of:        a step's
    apply_transfer: carries out an effect of the KV transfer
    itl_target_s:   see common/engine/pacing.py
    Mutable state: what has come and is not handled yet, whether a step is under way, and when the next one may begin.
    """

    def __init__(
        self,
        service: WorkerService[EventT, EffectT],
        clock: Clock,
        host: Host,
        *,
        time_of: Callable[[StepPlan], StepTime],
        send: Callable[[PeerId, Control], None],
        apply_transfer: Callable[[EffectT], None],
        itl_target_s: float = 0.0,
    ) -> None:
        self._service = service
        self._clock = clock
        self._host = host
        self._time_of = time_of
        self._send = send
        self._apply_transfer = apply_transfer
        self._pacer = Pacer(itl_target_s)
        self._inbox: deque[LinkEvent | EventT | Tick] = deque()
        self._is_stepping = False
        self._next_start_s = 0.0
        clock.every(TICK_S, lambda: self.hear(Tick()))

    def status(self) -> WorkerStatus:
        return self._service.status(self._clock.now)

    def hear(self, event: LinkEvent | EventT | Tick) -> None:
        self._inbox.append(event)
        self._go_on()

    def _go_on(self) -> None:
        if self._is_stepping:
            return
        while self._inbox:
            self._do(self._service.handle(self._inbox.popleft(), self._clock.now))
        if self._clock.now >= self._next_start_s or not self._host.is_computing:
            self._step()

    def _step(self) -> None:
        plan, effects = self._service.plan(self._clock.now)
        self._do(effects)
        if plan:
            self._is_stepping = True
            started_s = self._clock.now
            self._host.run(self._time_of(plan), lambda: self._complete(plan, started_s))

    def _complete(self, plan: StepPlan, started_s: float) -> None:
        self._is_stepping = False
        result = _result(plan, self._clock.now - started_s)
        self._do(self._service.complete(plan, result, self._clock.now))
        now = self._clock.now
        others_want_cores = self._pacer.is_pacing and self._host.is_computing
        self._next_start_s = self._pacer.next_start_s(started_s, now, others_want_cores=others_want_cores)
        if self._next_start_s > now:
            self._clock.at(self._next_start_s, self._go_on)
        self._go_on()

    def _do(self, effects: Sequence[Send | EffectT]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect.peer, effect.message)
            else:
                self._apply_transfer(effect)


def _result(plan: StepPlan, duration_s: float) -> StepResult:
    return StepResult(
        sampled={sequence.key: _TOKEN_ID for sequence in plan.sequences if sequence.sampling is not None},
        checksums={block_id: _CHECKSUMS for sequence in plan.sequences for block_id in sequence.seal},
        duration_s=duration_s,
    )
