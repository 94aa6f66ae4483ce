"""When a worker's step is overdue, who notices it, and who is sent there no more."""

from dataclasses import replace

from common.engine.step import ScheduledSequence, StepPlan
from common.engine.turn import Patience, Turn
from common.hang import OVERDUE_S, hangs_after_s, is_overdue
from common.ids import RequestId, SequenceKey
from common.service import Received
from common.wire import DecodeRequest, PrefillRequest, Role
from tests.unit.requests_rig import D0, D1, P0, P1, Bench, prefill_done, status


def test_a_step_is_overdue_when_it_takes_long_in_itself_and_for_its_machine() -> None:
    assert not is_overdue(OVERDUE_S, expected_s=0.02)
    assert is_overdue(OVERDUE_S + 0.1, expected_s=0.02)
    assert not is_overdue(19.0, expected_s=2.0)
    assert is_overdue(21.0, expected_s=2.0)


def test_a_worker_waits_for_its_loop_as_long_as_its_operator_says_unless_its_machine_needs_more() -> None:
    assert hangs_after_s(60.0, expected_s=0.5) == 60.0
    assert hangs_after_s(60.0, expected_s=30.0) == 300.0


def turn(started_s: float, *names: str) -> Turn:
    sequences = [
        ScheduledSequence(
            key=SequenceKey(RequestId(name), 2),
            token_ids=[1, 2],
            start=0,
            block_table=[],
            sampling=None,
            prompt_token_ids=[],
            output_token_ids=[],
        )
        for name in names
    ]
    return Turn(started_s, StepPlan(tuple(sequences)) if names else None)


def test_only_the_same_turn_counts_and_only_while_somebody_looks() -> None:
    patience = Patience(every_s=0.5)
    assert patience.see(turn(1.0)) == 0.0
    assert patience.see(turn(1.0, "a")) == 0.5, "it has come to its step"
    assert patience.see(turn(1.0, "a")) == 1.0, "however long ago the last look was: the process may have been stopped"
    assert patience.see(turn(9.0)) == 0.0


def test_a_turn_says_what_it_is_at() -> None:
    assert str(turn(1.0)) == "what the loop does between two steps"
    assert str(turn(1.0, "a")) == "the step of a/2 with 2 tokens"
    assert str(turn(1.0, "a", "b", "c")) == "the step of a/2 and 2 others with 6 tokens"


def stuck(bench: Bench, peer: str, role: Role) -> None:
    worker = next(worker for worker in (P0, P1, D0, D1) if worker == peer)
    overdue = replace(status(worker, role), step_running_s=OVERDUE_S + 1, step_expected_s=0.1)
    bench.do(Received(worker, overdue))


def test_a_gateway_whose_only_worker_of_a_pool_is_stuck_is_not_ready_until_it_goes_on() -> None:
    for peer, role in ((P0, Role.PREFILL), (D0, Role.DECODE)):
        bench = Bench()
        bench.join((P0, Role.PREFILL), (D0, Role.DECODE))
        assert bench.requests.fleet.missing_pools() == []
        stuck(bench, peer, role)
        assert bench.requests.fleet.missing_pools() == [role.value]
        bench.join((peer, role))
        assert bench.requests.fleet.missing_pools() == []


def test_nothing_new_is_sent_to_a_worker_that_is_stuck() -> None:
    bench = Bench()
    bench.join((P0, Role.PREFILL), (P1, Role.PREFILL), (D0, Role.DECODE), (D1, Role.DECODE))
    stuck(bench, P0, Role.PREFILL)
    stuck(bench, D1, Role.DECODE)
    for number in range(20):
        bench.submit(str(number))
        peer, request = bench.take(PrefillRequest)
        assert peer == P1
        assert isinstance(request, PrefillRequest)
        bench.do(Received(peer, prefill_done(request, peer)))
        assert bench.take(DecodeRequest)[0] == D0


def test_what_a_stuck_worker_has_stays_there_until_it_ends() -> None:
    """It may just be slow; when it has hung it ends itself, which is a lost link like any other."""
    bench = Bench()
    bench.join((P0, Role.PREFILL), (D0, Role.DECODE), (D1, Role.DECODE))
    bench.submit()
    bench.prefill()
    peer, _ = bench.decode()
    stuck(bench, peer, Role.DECODE)
    assert bench.sent == []
    assert bench.requests.totals["retries"] == 0
