"""Which KV a gateway asks its workers to keep."""

from common.ids import RequestId
from common.service import LinkLost, Received, Tick
from common.wire import Ended, EndReason, PrefillRequest, Role, Tokens
from gateway.requests import Abort
from tests.unit.requests_rig import D0, GREEDY, P0, P1, Bench, prefill_done, started, tokens

A = RequestId("a")


def decoding() -> Bench:
    """A request whose first token of decode is out."""
    bench = started()
    bench.submit()
    bench.prefill()
    peer, request = bench.decode()
    bench.do(Received(peer, Tokens(entries=(tokens(request, 1, 1),))))
    return bench


def test_a_request_that_lives_is_named_where_its_prompt_was_computed_and_nowhere_else() -> None:
    bench = started()
    bench.submit()
    bench.prefill()
    assert bench.requests.leases(P0) == ((A, 0),)
    peer, request = bench.decode()
    for index in range(1, GREEDY.max_tokens - 1):
        bench.do(Received(peer, Tokens(entries=(tokens(request, index, 1),))))
        assert bench.requests.leases(P0) == ((A, 0),)
        assert bench.requests.leases(D0) == ()
    bench.do(Received(peer, Tokens(entries=(tokens(request, GREEDY.max_tokens - 1, 1),))))
    assert bench.requests.leases(P0) == ()


def test_nothing_is_kept_for_a_client_that_left() -> None:
    bench = decoding()
    bench.do(Abort(A))
    assert bench.requests.leases(P0) == ()


def test_the_prompt_is_kept_while_the_next_attempt_waits_for_a_worker_and_while_it_is_computed() -> None:
    bench = decoding()
    bench.do(LinkLost(D0, "broken"))
    bench.do(Tick())
    assert bench.requests.leases(P0) == ((A, 1),), "it waits for a decode worker"
    bench.join((D0, Role.DECODE))
    assert bench.take(PrefillRequest)[0] == P0
    assert bench.requests.leases(P0) == ((A, 1),)


def test_a_request_that_was_preempted_is_kept_too() -> None:
    bench = decoding()
    bench.do(Received(D0, Ended(request_id=A, attempt=0, reason=EndReason.PREEMPTED, detail="")))
    assert bench.requests.leases(P0) == ((A, 1),)


def test_a_prompt_that_is_computed_elsewhere_is_not_kept_where_it_was() -> None:
    bench = decoding()
    bench.join((P1, Role.PREFILL))
    bench.do(LinkLost(P0, "broken"))
    bench.do(LinkLost(D0, "broken"))
    bench.join((D0, Role.DECODE))
    assert bench.take(PrefillRequest)[0] == P1
    assert (bench.requests.leases(P0), bench.requests.leases(P1)) == ((), ((A, 1),))


def test_a_worker_that_goes_on_by_itself_keeps_nothing_besides() -> None:
    bench = Bench()
    bench.join((P0, Role.BOTH))
    bench.submit()
    peer, request = bench.take(PrefillRequest)
    assert isinstance(request, PrefillRequest)
    bench.do(Received(peer, prefill_done(request, peer, Role.BOTH)))
    assert bench.requests.leases(P0) == ()
