"""The real driver of a worker's sans-I/O service: a plain loop that blocks when there is nothing to do."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from common.engine.gateway_watch import GatewayWatch
from common.engine.pacing import Pacer
from common.engine.step import StepPlan, StepResult
from common.engine.turn import Turn
from common.engine.worker import WorkerService
from common.errors import BatonError, GroupFailed
from common.ids import PeerId
from common.service import TICK_S, LinkEvent, LinkFull, Send, Tick
from common.wire import Control, WorkerStatus

logger = logging.getLogger(__name__)

CLAIM_S = 0.0005
"""How long before a paced step cores on loan are claimed back: as long as the tasks of most phases take."""

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")


class Runner(Protocol):
    """Executes plans; the only thing here that computes."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def claim_cores(self) -> None:
        """A step follows soon: whoever has cores of ours on loan is to be off them by then."""
        ...

    def rest(self) -> None:
        """No step follows for now: its cores may serve others."""
        ...

    def others_want_cores(self) -> bool:
        """Whether another worker of this host has work that our cores could help with."""
        ...


class Stop:
    """Drain, then return from `run`; the second one: leave at once."""


class WorkerLoop(Generic[EventT, EffectT]):
    """Takes events from one inbox, runs steps, carries out effects.

    Owned by the main thread, but for `current_status` and `current_turn`, which any thread may call.
    inbox:          anybody may put events into it, also a signal handler; they are handled between two steps
    apply_transfer: carries out an effect of the KV transfer; waits for nobody but the ranks of this worker
    extra_counters: totals kept outside of the service, for its status
    is_healthy:     False when a thread that the loop depends on has died
    step_expected_s: what a large step takes here, see hang.py
    itl_target_s:   see pacing.py
    on_tick:        what else is done with every tick
    watch:          hears and sees the time, as the service does
    """

    def __init__(
        self,
        service: WorkerService[EventT, EffectT],
        runner: Runner,
        *,
        inbox: "SimpleQueue[LinkEvent | EventT | Stop]",
        send: Callable[[PeerId, Control], bool],
        apply_transfer: Callable[[EffectT], None],
        extra_counters: Callable[[], dict[str, float]],
        is_healthy: Callable[[], bool],
        watch: GatewayWatch,
        drain_timeout_s: float,
        step_expected_s: float,
        itl_target_s: float = 0.0,
        on_tick: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._runner = runner
        self._send = send
        self._apply_transfer = apply_transfer
        self._extra_counters = extra_counters
        self._is_healthy = is_healthy
        self._watch = watch
        self._drain_timeout_s = drain_timeout_s
        self.step_expected_s = step_expected_s
        self._pacer = Pacer(itl_target_s)
        self._on_tick = on_tick
        self._clock = clock
        self._inbox = inbox
        self._next_tick_s = clock()
        self._turn = Turn(clock())
        self._next_start_s = clock()
        self._is_lending = False
        self._leave_by_s: float | None = None
        self._status = service.status(clock())

    def current_status(self) -> WorkerStatus:
        """The last status, with how long the loop has been at its turn until now."""
        status = self._status
        return replace(
            status,
            step_running_s=max(0.0, self._clock() - self._turn.started_s),
            step_expected_s=self.step_expected_s,
            counters={**status.counters, **self._extra_counters()},
        )

    def current_turn(self) -> Turn:
        return self._turn

    def run(self) -> None:
        """Until stopped and drained.

        Raises: BatonError when it is not healthy any more; whoever started the process starts it again.
        """
        is_idle = True
        while not self.may_leave():
            is_idle = not self.turn(wait=is_idle)

    def turn(self, *, wait: bool) -> bool:
        """Events, a tick if it is due, a step. Returns False when there was nothing to compute, or not yet.

        wait: block for the first event until `due_s`
        """
        self._handle_events(wait=wait)
        self._tick_if_due()
        return self._step()

    def due_s(self, now: float) -> float:
        """When the next tick or step is due, if no event comes before."""
        if self._next_start_s <= now:
            return self._next_tick_s
        return min(self._next_tick_s, self._next_start_s - CLAIM_S if self._is_lending else self._next_start_s)

    def may_leave(self) -> bool:
        """Whether it was told to stop, and has nothing left to do; gives up what is left when it is time."""
        if self._leave_by_s is None:
            return False
        if self._clock() < self._leave_by_s:
            return self._service.is_drained
        self._do(self._service.abandon())
        return True

    def _handle_events(self, *, wait: bool) -> None:
        now = self._clock()
        self._turn = Turn(now)
        event = self._next_event(max(0.0, self.due_s(now) - now) if wait else 0.0)
        while event is not None:
            self._handle(event)
            event = self._next_event(0.0)

    def _next_event(self, timeout_s: float) -> LinkEvent | EventT | Stop | None:
        try:
            return self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
        except Empty:
            return None

    def _handle(self, event: LinkEvent | EventT | Stop) -> None:
        if isinstance(event, Stop):
            self._begin_to_leave()
        else:
            now = self._clock()
            self._watch.hear(event, now)
            self._do(self._service.handle(event, now))

    def _begin_to_leave(self) -> None:
        if self._leave_by_s is not None:
            self._leave_by_s = self._clock()
            return
        logger.info("draining for at most %.0f s", self._drain_timeout_s)
        self._leave_by_s = self._clock() + self._drain_timeout_s
        self._do(self._service.drain())

    def _tick_if_due(self) -> None:
        now = self._clock()
        if now < self._next_tick_s:
            return
        if not self._is_healthy():
            raise BatonError("a thread of this worker has died, see the log above")
        self._next_tick_s = now + TICK_S
        self._on_tick()
        self._watch.tick(now)
        self._do(self._service.handle(Tick(), now))
        self._status = self._service.status(now)

    def _step(self) -> bool:
        now = self._clock()
        if self._must_wait(now):
            return False
        self._is_lending = False
        plan, effects = self._service.plan(now)
        self._do(effects)
        if plan is None:
            self._runner.rest()
            return False
        started_s = self._clock()
        turn, self._turn = self._turn, replace(self._turn, plan=plan)
        result = self._execute(plan)
        self._turn = turn
        self._do(self._service.complete(plan, result, self._clock()))
        self._pace(started_s)
        return True

    def _pace(self, started_s: float) -> None:
        now = self._clock()
        others_want_cores = self._pacer.is_pacing and self._runner.others_want_cores()
        self._next_start_s = self._pacer.next_start_s(started_s, now, others_want_cores=others_want_cores)
        self._is_lending = self._next_start_s > now
        if self._is_lending:
            self._runner.rest()

    def _must_wait(self, now: float) -> bool:
        """For the time of the next step, while there still is somebody to wait for."""
        if now >= self._next_start_s or not self._runner.others_want_cores():
            return False
        if self._is_lending and now >= self._next_start_s - CLAIM_S:
            self._is_lending = False
            self._runner.claim_cores()
        return True

    def _execute(self, plan: StepPlan) -> StepResult:
        """A step that breaks ends the requests in it, not the worker. Raises: GroupFailed."""
        started_s = self._clock()
        try:
            return self._runner.execute(plan)
        except GroupFailed:
            raise
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(plan.sequences))
            failed = {sequence.key: f"the step failed: {error}" for sequence in plan.sequences}
            return StepResult(sampled={}, failed=failed, duration_s=self._clock() - started_s)

    def _do(self, effects: Sequence[Send | EffectT]) -> None:
        now = self._clock()
        for effect in effects:
            if not isinstance(effect, Send):
                self._apply_transfer(effect)
            elif not self._send(effect.peer, effect.message):
                self._do(self._service.handle(LinkFull(effect.peer, effect.message), now))
