"""A request that workers die of, and those that are with it."""

from itertools import count

from common.ids import PeerId, RequestId
from common.service import LinkLost, Received, Tick
from common.wire import DecodeRequest, Ended, EndReason, PrefillRequest, Role, Tokens
from tests.unit.requests_rig import D0, POLICY, Bench, prefill_done, tokens

POISON = RequestId("poison")


class Ward:
    """One prefill worker at a time, which the poison kills, and a decode worker that completes what it gets.

    Mutable state: which prefill worker lives, and whom each was asked for.
    """

    def __init__(self) -> None:
        self.bench = Bench()
        self.asked: list[list[RequestId]] = []
        self._numbers = count()
        self.start_worker()

    def start_worker(self) -> None:
        self.bench.now += 1.0
        self.peer = PeerId(f"p0#{next(self._numbers)}")
        self.bench.join((D0, Role.DECODE), (self.peer, Role.PREFILL))

    def serve(self) -> None:
        """The worker takes all that it was sent: it dies of the poison, or computes it."""
        sent, self.bench.sent = self.bench.sent, []
        asked = [m for peer, m in sent if peer == self.peer and isinstance(m, PrefillRequest)]
        self.asked.append([message.request_id for message in asked])
        if any(message.request_id == POISON for message in asked):
            self.bench.do(LinkLost(self.peer, "broken"))
            self.start_worker()
            return
        for message in asked:
            self.bench.do(Received(self.peer, prefill_done(message, self.peer)))
        self.decode()

    def decode(self) -> None:
        for peer, message in self.bench.sent.copy():
            if isinstance(message, DecodeRequest):
                self.bench.sent.remove((peer, message))
                index = len(message.output_token_ids)
                self.bench.do(Received(peer, Tokens(entries=(tokens(message, index, 6 - index),))))


def test_a_request_that_kills_whoever_runs_it_ends_and_those_that_were_with_it_go_on() -> None:
    ward = Ward()
    clients = {name: ward.bench.submit(name) for name in ("a", POISON, "b")}
    for _ in range(10):
        ward.serve()
        ward.bench.do(Tick())
    poison = clients.pop(POISON)
    assert poison.error is not None
    assert poison.error.code == "too_many_attempts"
    assert all(client.token_ids == client.expected for client in clients.values())
    assert [asked for asked in ward.asked if asked] == [["a", POISON, "b"], ["a", POISON, "b"], ["a"], [POISON], ["b"]]


def test_what_is_new_does_not_wait_for_a_trial_and_is_not_blamed_for_its_death() -> None:
    ward = Ward()
    poison = ward.bench.submit(POISON)
    ward.serve()
    ward.serve()
    late = ward.bench.submit("late")
    ward.serve()
    assert ward.asked[-1] == [POISON, "late"]
    assert poison.error is not None
    ward.serve()
    assert late.token_ids == late.expected


def test_who_waits_for_its_turn_is_not_told_that_there_are_no_workers() -> None:
    ward = Ward()
    clients = [ward.bench.submit(name) for name in ("a", "b")]
    for _ in range(2):
        ward.bench.do(LinkLost(ward.peer, "broken"))
        ward.start_worker()
    for _ in range(100):
        ward.bench.now += 0.5
        ward.bench.join((D0, Role.DECODE), (ward.peer, Role.PREFILL))
        ward.bench.do(Tick())
    assert [client.error for client in clients] == [None, None]
    ward.serve()
    ward.serve()
    assert all(client.token_ids == client.expected for client in clients)


def test_a_death_that_was_known_counts_for_nobody_who_was_sent_to_the_dead_worker_by_a_late_status() -> None:
    bench = Bench()
    p0, p1 = PeerId("p0#0"), PeerId("p1#0")
    bench.join((D0, Role.DECODE), (p0, Role.PREFILL))
    client = bench.submit("a")
    for dead in (p0, p1):
        bench.now += 1.0
        bench.join((D0, Role.DECODE), (dead, Role.PREFILL))
        bench.do(LinkLost(dead, "broken"))
    assert bench.requests.totals["retries"] == 2
    for _ in range(3):
        bench.now += 0.1
        bench.join((p1, Role.PREFILL))
        bench.do(LinkLost(p1, "another one lives at its address"))
    assert client.error is None


def fail_transfer(bench: Bench) -> None:
    """The decode worker cannot pull the KV that the prefill worker has computed."""
    bench.prefill()
    _, message = bench.decode()
    bench.sent.clear()
    bench.now += 0.1
    name, attempt, why = message.request_id, message.attempt, "the connection broke"
    bench.do(Received(D0, Ended(request_id=name, attempt=attempt, reason=EndReason.TRANSFER, detail=why)))


def test_a_transfer_that_the_death_of_its_source_ends_counts_for_nobody() -> None:
    """Whether the gateway learns of the death before the transfer or after it."""
    bench = Bench()
    client = bench.submit()
    for number in range(POLICY.max_attempts + 1):
        peer = PeerId(f"p0#{number}")
        bench.now += 1.0
        bench.join((D0, Role.DECODE), (peer, Role.PREFILL))
        bench.do(Tick())
        fail_transfer(bench)
        bench.sent.clear()
        bench.do(LinkLost(peer, "broken"))
    assert client.error is None
    assert not client.is_ended


def test_transfers_that_fail_from_a_worker_that_lives_end_the_request() -> None:
    bench = Bench()
    client = bench.submit()
    peer = PeerId("p0#0")
    bench.join((D0, Role.DECODE), (peer, Role.PREFILL))
    for _ in range(POLICY.max_attempts + 1):
        assert client.error is None
        bench.now += 1.0
        bench.join((peer, Role.PREFILL))
        bench.do(Tick())
        fail_transfer(bench)
    assert client.error is not None
    assert client.error.code == "too_many_attempts"
