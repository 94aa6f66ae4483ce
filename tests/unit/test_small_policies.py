"""Finishes, tombstones, who is alive, and the real loops over fakes."""

from dataclasses import replace
from queue import SimpleQueue

import pytest

from common.engine.gateway_watch import GatewayWatch
from common.engine.step import ScheduledSequence, StepPlan, StepResult
from common.engine.worker import WorkerService
from common.engine.worker_loop import Stop, WorkerLoop
from common.errors import BatonError
from common.ids import PeerId, RequestId, SequenceKey
from common.peers import LivePeers, Tombstones
from common.sampling import Finish, FinishReason, SamplingParams, check_finish
from common.service import LinkFull, Send, Tick
from common.wire import Cancel, Control, Role, WorkerStatus
from gateway.fleet import NO_MATCH, WORKER_TIMEOUT_S, Fleet
from tests.fakes import fake_layout
from tests.unit.requests_rig import D0, D1, P0, P1, status

PARAMS = SamplingParams(max_tokens=3, eos_token_ids=(2,), stop_token_ids=(7,))


@pytest.mark.parametrize(
    ("output", "params", "finish"),
    [
        ([5], PARAMS, None),
        ([5, 2], PARAMS, Finish(FinishReason.STOP)),
        ([5, 7], PARAMS, Finish(FinishReason.STOP, 7)),
        ([5, 5, 5], PARAMS, Finish(FinishReason.LENGTH)),
        ([5, 5, 2], PARAMS, Finish(FinishReason.STOP)),
        ([2], replace(PARAMS, ignore_eos=True), None),
        ([7], replace(PARAMS, ignore_eos=True), Finish(FinishReason.STOP, 7)),
    ],
)
def test_the_end_token_comes_before_stop_tokens_and_both_before_the_length(
    output: list[int], params: SamplingParams, finish: Finish | None
) -> None:
    assert check_finish(params, output) == finish


def test_a_tombstone_covers_earlier_attempts_and_the_oldest_is_forgotten() -> None:
    tombstones = Tombstones(capacity=2)
    tombstones.add(SequenceKey(RequestId("a"), 1))
    assert SequenceKey(RequestId("a"), 0) in tombstones
    assert SequenceKey(RequestId("a"), 2) not in tombstones
    tombstones.add(SequenceKey(RequestId("b"), 0))
    tombstones.add(SequenceKey(RequestId("c"), 0))
    assert SequenceKey(RequestId("a"), 0) not in tombstones


def test_a_peer_is_silent_once() -> None:
    peers = LivePeers(timeout_s=2)
    peers.heard(P0, 0.0)
    assert peers.pop_silent(2.0) == []
    assert peers.pop_silent(2.1) == [P0]
    assert peers.pop_silent(9.0) == []


def watched_fleet(model_hash: str = "fake-model") -> tuple[Fleet, list[str]]:
    """With what it told of its workers."""
    told: list[str] = []
    return Fleet(model_hash, lambda name, problem: told.append(f"{name}: {problem}")), told


def test_workers_of_another_model_are_refused_and_told_of_once_an_incarnation() -> None:
    fleet, told = watched_fleet("another")
    again = PeerId("p0#2")
    for now in range(5000):
        fleet.observe(P0, status(P0, Role.PREFILL), now / 2)
        fleet.pop_silent(now / 2)
    fleet.observe(again, status(again, Role.PREFILL), 2500.0)
    assert told == ["p0: it has another model, with hash fake-model and not another"] * 2
    assert fleet.all() == []


def test_pools_without_a_common_kv_layout_cannot_serve_and_each_misfit_is_told_of_once() -> None:
    fleet, told = watched_fleet()
    misfit = replace(fake_layout(), dtype="bfloat16", block_size=8)
    for now in range(10):
        fleet.observe(P0, status(P0, Role.PREFILL), now / 2)
        fleet.observe(P1, status(P1, Role.PREFILL), now / 2)
        fleet.observe(D0, status(D0, Role.DECODE, layout=misfit), now / 2)
    difference = "dtype: 'bfloat16' != 'float32', block_size: 8 != 4 of p0, p1"
    assert told == [f"d0: no prefill worker has its KV layout: {difference}"]
    assert (fleet.missing_pools(), fleet.prompt_workers()) == ([NO_MATCH], [])
    fleet.remove(D0, 5.0)
    fleet.observe(D0, status(D0, Role.DECODE, layout=misfit), 5.0)
    fleet.observe(D1, status(D1, Role.DECODE), 5.0)
    assert (fleet.missing_pools(), len(told)) == ([], 1)
    assert [w.peer for w in fleet.prompt_workers()] == [P0, P1]
    assert [w.peer for w in fleet.matching(misfit)] == [D0]


def test_a_worker_that_does_both_needs_nobody_else_and_is_no_match_for_others() -> None:
    fleet, told = watched_fleet()
    fleet.observe(P0, status(P0, Role.PREFILL), 0.0)
    fleet.observe(P1, status(P1, Role.BOTH, layout=replace(fake_layout(), block_size=8)), 0.0)
    assert (fleet.missing_pools(), told) == ([], [])
    assert [w.peer for w in fleet.prompt_workers()] == [P1]
    assert fleet.matching(fake_layout(block_size=8)) == []
    fleet.note_draining(P1)
    assert fleet.missing_pools() == ["decode"]


def test_a_draining_worker_is_no_match_for_new_prompts() -> None:
    fleet, told = watched_fleet()
    misfit = replace(fake_layout(), block_size=8)
    fleet.observe(P0, status(P0, Role.PREFILL), 0.0)
    fleet.observe(D0, status(D0, Role.DECODE), 0.0)
    fleet.observe(D1, status(D1, Role.DECODE, layout=misfit), 0.0)
    assert fleet.missing_pools() == []
    fleet.note_draining(D0)
    assert fleet.missing_pools() == [NO_MATCH]
    assert told == ["d1: no prefill worker has its KV layout: block_size: 8 != 4 of p0"]


def test_silent_workers_are_forgotten() -> None:
    fleet = Fleet("fake-model", lambda name, problem: None)
    fleet.observe(P0, status(P0, Role.PREFILL), 0.0)
    assert fleet.missing_pools() == ["decode"]
    assert fleet.max_context(1000) == 400
    assert [worker.peer for worker in fleet.pop_silent(WORKER_TIMEOUT_S + 0.1)] == [P0]
    assert fleet.max_context(1000) == 1000


def test_draining_workers_get_nothing_new() -> None:
    fleet = Fleet("fake-model", lambda name, problem: None)
    fleet.observe(P0, status(P0, Role.PREFILL, is_draining=True), 0.0)
    assert fleet.prompt_workers() == []


class LoopService:
    """Plans one step per number it was told, and notes what happens."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.results: list[StepResult] = []
        self.num_steps = 0
        self.is_drained = True

    def handle(self, event: object, now: float) -> list[Send | str]:
        if not isinstance(event, Tick):
            self.events.append(event)
        if isinstance(event, int):
            self.num_steps += event
            return ["moved", Send(P0, Cancel(request_id=RequestId("a"), attempt=0))]
        return []

    def plan(self, now: float) -> tuple[StepPlan | None, list[Send | str]]:
        if self.num_steps == 0:
            return None, []
        self.num_steps -= 1
        params = SamplingParams(max_tokens=1)
        key = SequenceKey(RequestId("a"), self.num_steps)
        sequence = ScheduledSequence(
            key=key,
            token_ids=(1,),
            start=0,
            block_table=(),
            sampling=params,
            prompt_token_ids=(1,),
            output_token_ids=(),
        )
        return StepPlan((sequence,)), []

    def complete(self, plan: StepPlan, result: StepResult, now: float) -> list[Send | str]:
        self.results.append(result)
        return []

    def drain(self) -> list[Send | str]:
        self.events.append("drain")
        return []

    def abandon(self) -> list[Send | str]:
        self.events.append("abandon")
        return []

    def status(self, now: float) -> WorkerStatus:
        return status(P0, Role.PREFILL)


class BrokenRunner:
    def claim_cores(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def others_want_cores(self) -> bool:
        return False

    def execute(self, plan: StepPlan) -> StepResult:
        raise ValueError("out of memory")


def make_loop(
    service: WorkerService[object, str], *events: object, is_healthy: bool = True, is_full: bool = False
) -> tuple[WorkerLoop[object, str], list[object]]:
    inbox: SimpleQueue[object] = SimpleQueue()
    for event in events:
        inbox.put(event)
    done: list[object] = []

    def send(peer: PeerId, message: Control) -> bool:
        done.append(message)
        return not is_full

    loop: WorkerLoop[object, str] = WorkerLoop(
        service,
        BrokenRunner(),
        inbox=inbox,  # pyright: ignore[reportArgumentType]
        send=send,
        apply_transfer=done.append,
        extra_counters=lambda: {"extra": 1.0},
        is_healthy=lambda: is_healthy,
        watch=GatewayWatch(0, lambda num_joined: None, 0.0),
        drain_timeout_s=30,
        step_expected_s=0.0,
    )
    return loop, done


def test_a_step_that_breaks_ends_its_requests_and_not_the_worker() -> None:
    service = LoopService()
    loop, done = make_loop(service, 2)
    loop._handle_events(wait=False)  # pyright: ignore[reportPrivateUsage]
    while loop._step():  # pyright: ignore[reportPrivateUsage]
        pass
    assert [list(result.failed.values()) for result in service.results] == [["the step failed: out of memory"]] * 2
    assert done == ["moved", Cancel(request_id=RequestId("a"), attempt=0)]
    assert loop.current_status().counters["extra"] == 1.0


def test_stop_drains_and_a_second_stop_leaves_at_once() -> None:
    service = LoopService()
    loop, _ = make_loop(service, Stop())
    loop.run()
    assert service.events == ["drain"]
    stuck = LoopService()
    stuck.is_drained = False
    loop, _ = make_loop(stuck, Stop(), Stop())
    loop.run()
    assert stuck.events == ["drain", "abandon"]


def test_what_a_link_did_not_take_comes_back_as_an_event() -> None:
    service = LoopService()
    loop, _ = make_loop(service, 1, Stop(), is_full=True)
    loop.run()
    assert LinkFull(P0, Cancel(request_id=RequestId("a"), attempt=0)) in service.events


def test_a_dead_thread_ends_the_worker() -> None:
    loop, _ = make_loop(LoopService(), is_healthy=False)
    with pytest.raises(BatonError, match="thread"):
        loop.run()
