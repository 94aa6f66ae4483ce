"""The real loop around real services: what happens between steps, and how it ends."""

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from common.engine.gateway_watch import GatewayWatch
from common.engine.pacing import AIM
from common.engine.step import StepPlan, StepResult
from common.engine.turn import Turn
from common.engine.worker import GATEWAY_TIMEOUT_S
from common.engine.worker_loop import CLAIM_S, Stop, WorkerLoop
from common.ids import PeerId
from common.service import TICK_S, LinkLost, Received
from common.wire import Cancel, Control, Ended, EndReason, GatewayStatus, PrefillDone, WorkerStatus
from kvtransfer.transport import KVReleased, Publish, Withdraw
from tests.fakes import FakeRunner
from tests.unit.test_prefill_service import prompt
from tests.unit.test_worker_services import GATEWAY, KEY, LAYOUT, STATUS, Prefill

STEP_S = 0.03
STEP_EXPECTED_S = 0.5
TOO_MANY_STEPS = 1000


class ScriptedRunner:
    """Runs steps on a virtual clock; `during` plays what happens while step 0, 1, 2, … runs."""

    def __init__(self, num_blocks: int, during: dict[int, Callable[[], object]]) -> None:
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self._runner = FakeRunner(num_blocks, LAYOUT)
        self._during = during
        self.num_rests = 0
        self.claimed_at_s: list[float] = []
        self.do_others_want = False

    def claim_cores(self) -> None:
        self.claimed_at_s.append(self.now)

    def rest(self) -> None:
        self.num_rests += 1

    def others_want_cores(self) -> bool:
        return self.do_others_want

    def execute(self, plan: StepPlan) -> StepResult:
        assert len(self.plans) < TOO_MANY_STEPS
        self.now += STEP_S
        self._during.get(len(self.plans), lambda: None)()
        self.plans.append(plan)
        return self._runner.execute(plan)


class Rig:
    """A prefill worker's loop; KV is fetched and released at once, and Stop comes with the last release.

    num_handoffs: after so many the loop is told to stop
    """

    def __init__(
        self,
        *,
        num_handoffs: int = 1,
        max_batch_tokens: int = 64,
        drain_timeout_s: float = 30,
        itl_target_s: float = 0.0,
        during: dict[int, Callable[[], object]] | None = None,
    ) -> None:
        self.prefill = Prefill(num_blocks=64, max_batch_tokens=max_batch_tokens)
        self.runner = ScriptedRunner(64, during or {})
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.sent: list[tuple[PeerId, Control]] = []
        self.effects: list[object] = []
        self.missing: list[int] = []
        self.apply_transfer: Callable[[object], None] = self.apply
        self._num_handoffs = num_handoffs
        self.loop: WorkerLoop[Any, Any] = WorkerLoop(
            self.prefill.service,
            self.runner,
            inbox=self.inbox,
            send=self._send,
            apply_transfer=lambda effect: self.apply_transfer(effect),
            extra_counters=dict,
            is_healthy=lambda: True,
            watch=GatewayWatch(1, self.missing.append, -GATEWAY_TIMEOUT_S),
            drain_timeout_s=drain_timeout_s,
            step_expected_s=STEP_EXPECTED_S,
            itl_target_s=itl_target_s,
            clock=lambda: self.runner.now,
        )

    def _send(self, peer: PeerId, message: Control) -> bool:
        self.sent.append((peer, message))
        return True

    def apply(self, effect: object) -> None:
        self.effects.append(effect)
        if isinstance(effect, Publish):
            self.inbox.put(KVReleased(effect.key))
            self._num_handoffs -= 1
            if self._num_handoffs == 0:
                self.inbox.put(Stop())

    def messages(self, kind: type[Control]) -> list[Control]:
        return [message for _, message in self.sent if isinstance(message, kind)]


def test_requests_become_handoffs_in_the_order_of_effects() -> None:
    rig = Rig(num_handoffs=2)
    for name in "ab":
        rig.inbox.put(Received(GATEWAY, prompt(name)))
    rig.loop.run()
    assert [message.request_id for message in rig.messages(PrefillDone) if isinstance(message, PrefillDone)] == [*"ab"]
    assert [type(effect) for effect in rig.effects] == [Publish, Publish, Withdraw, Withdraw]
    assert rig.prefill.blocks.num_owned == 0


def test_what_comes_while_a_step_runs_is_handled_before_the_next_one() -> None:
    """`a` takes several steps; it is cancelled during the first, so the second is the late `b`'s alone."""

    def interfere() -> None:
        rig.inbox.put(Received(GATEWAY, Cancel(request_id=KEY.request_id, attempt=0)))
        rig.inbox.put(Received(GATEWAY, prompt("b")))

    rig = Rig(during={0: interfere})
    rig.inbox.put(Received(GATEWAY, prompt("a", length=200)))
    rig.loop.run()
    assert [[s.key.request_id for s in plan.sequences] for plan in rig.runner.plans] == [["a"], ["b"]]
    assert rig.prefill.blocks.num_owned == 0


def test_a_link_that_is_lost_during_a_step_ends_its_requests_only() -> None:
    def lose() -> None:
        rig.inbox.put(LinkLost(GATEWAY, "gap"))
        rig.inbox.put(Received(GATEWAY, prompt("b")))

    rig = Rig(during={1: lose})
    rig.inbox.put(Received(GATEWAY, prompt("a", length=200)))
    rig.loop.run()
    (ended,) = rig.messages(Ended)
    assert isinstance(ended, Ended)
    assert (ended.request_id, ended.reason) == ("a", EndReason.LINK_LOST)
    assert len(rig.messages(PrefillDone)) == 1


@pytest.mark.parametrize(("heard", "missing"), [([], [0]), ([STATUS], [])])
def test_a_gateway_is_missed_until_it_is_heard_of(heard: list[GatewayStatus], missing: list[int]) -> None:
    rig = Rig()
    for message in (*heard, prompt("a")):
        rig.inbox.put(Received(GATEWAY, message))
    rig.loop.run()
    assert rig.missing == missing


def test_a_status_says_for_how_long_the_step_has_run_and_what_is_much() -> None:
    seen: list[WorkerStatus] = []
    rig = Rig(during={0: lambda: seen.append(rig.loop.current_status())})
    rig.inbox.put(Received(GATEWAY, prompt("a")))
    rig.loop.run()
    (status,) = seen
    assert (status.step_running_s, status.step_expected_s) == (pytest.approx(STEP_S), STEP_EXPECTED_S)


def test_the_turn_of_a_loop_names_its_step() -> None:
    seen: list[Turn] = []
    rig = Rig(num_handoffs=2, during={0: lambda: seen.append(rig.loop.current_turn())})
    for name in "ab":
        rig.inbox.put(Received(GATEWAY, prompt(name)))
    rig.loop.run()
    assert [str(turn) for turn in seen] == ["the step of a/0 and 1 others with 18 tokens"]


def test_a_loop_that_is_stuck_outside_of_a_step_is_seen_to_be() -> None:
    """Here in what carries out an effect of the KV transfer, for longer than any step lasts."""
    rig = Rig()
    seen: list[float] = []

    def get_stuck(effect: object) -> None:
        rig.runner.now += 7.0
        seen.append(rig.loop.current_status().step_running_s)
        rig.apply(effect)

    rig.apply_transfer = get_stuck
    rig.inbox.put(Received(GATEWAY, prompt("a")))
    rig.loop.run()
    assert all(running_s >= 7.0 for running_s in seen)
    assert len(seen) == 2


def test_a_status_is_renewed_with_every_tick_of_a_busy_loop() -> None:
    num_steps = int(2 * TICK_S / STEP_S)
    seen: list[float] = []
    rig = Rig(max_batch_tokens=16, during={num_steps: lambda: seen.append(rig.loop.current_status().counters["steps"])})
    rig.inbox.put(Received(GATEWAY, STATUS))
    rig.inbox.put(Received(GATEWAY, prompt("a", length=250)))
    rig.loop.run()
    assert 0 < seen[0] <= num_steps


def test_a_loop_that_is_told_to_stop_refuses_what_still_comes() -> None:
    def stop() -> None:
        rig.inbox.put(Stop())
        rig.inbox.put(Received(GATEWAY, prompt("late")))

    rig = Rig(during={0: stop})
    rig.inbox.put(Received(GATEWAY, prompt("a")))
    rig.loop.run()
    (refusal,) = rig.messages(Ended)
    assert isinstance(refusal, Ended)
    assert (refusal.request_id, refusal.reason) == ("late", EndReason.DRAINING)
    assert len(rig.messages(PrefillDone)) == 1


def test_what_is_left_after_the_drain_timeout_is_given_up() -> None:
    """The prompt takes four steps; it is told to stop during the first and has time for another one."""
    rig = Rig(drain_timeout_s=1.5 * STEP_S, during={0: lambda: rig.inbox.put(Stop())})
    rig.inbox.put(Received(GATEWAY, prompt("a", length=200)))
    rig.loop.run()
    (ended,) = rig.messages(Ended)
    assert isinstance(ended, Ended)
    assert ended.reason is EndReason.DRAINING
    assert len(rig.runner.plans) == 3
    assert rig.prefill.blocks.num_owned == 0


def test_cores_on_loan_between_paced_steps_are_claimed_back_shortly_before_the_next_one() -> None:
    rig = Rig(itl_target_s=0.1 / AIM)
    rig.runner.do_others_want = True
    rig.inbox.put(Received(GATEWAY, prompt("a", length=200)))
    for step in range(3):
        begun_s = rig.runner.now
        assert rig.loop.turn(wait=False)
        assert rig.runner.num_rests == step + 1
        for due_s in (begun_s + 0.1 - CLAIM_S, begun_s + 0.1):
            assert len(rig.runner.plans) == step + 1
            assert not rig.loop.turn(wait=False)
            assert rig.loop.due_s(rig.runner.now) == due_s
            rig.runner.now = due_s
        assert rig.runner.claimed_at_s[step:] == [begun_s + 0.1 - CLAIM_S]


def test_without_pacing_no_cores_are_lent_between_steps() -> None:
    rig = Rig()
    rig.runner.do_others_want = True
    rig.inbox.put(Received(GATEWAY, prompt("a", length=200)))
    for _ in range(3):
        assert rig.loop.turn(wait=False)
    assert rig.runner.num_rests == 0
    assert rig.runner.claimed_at_s == []


def test_a_paced_step_begins_as_soon_as_nobody_wants_the_cores_any_more() -> None:
    rig = Rig(itl_target_s=0.1 / AIM)
    rig.runner.do_others_want = True
    rig.inbox.put(Received(GATEWAY, prompt("a", length=200)))
    assert rig.loop.turn(wait=False)
    assert not rig.loop.turn(wait=False)
    rig.runner.do_others_want = False
    assert rig.loop.turn(wait=False)
    assert len(rig.runner.plans) == 2
