"""The life of requests in a gateway, by stories."""

from dataclasses import dataclass, field, replace

import pytest

from common.errors import RequestError
from common.ids import BlockId, PeerId, RequestId
from common.kv_layout import KVLayout
from common.sampling import Finish, FinishReason, SamplingParams
from common.service import LinkFull, LinkLost, Received, Send, Tick
from common.wire import (
    Cancel,
    Control,
    DecodeRequest,
    Ended,
    EndReason,
    KVDescriptor,
    KVSource,
    PrefillDone,
    PrefillRequest,
    Role,
    Tokens,
    TokensEntry,
    WorkerStatus,
)
from gateway.fleet import Fleet
from gateway.life import LifePolicy
from gateway.requests import Abort, Effect, Emit, Event, Fail, Requests, Submit
from tests.fakes import expected_tokens, fake_layout, next_token

POLICY = LifePolicy(
    max_concurrent_requests=100, request_timeout_s=60, no_worker_timeout_s=5, resume_timeout_s=8, max_attempts=3
)
PROMPT = (1, 2, 3, 4, 5)
GREEDY = SamplingParams(max_tokens=6, temperature=0)
P0, P1, D0, D1 = PeerId("p0#1"), PeerId("p1#1"), PeerId("d0#1"), PeerId("d1#1")


def status(peer: PeerId, role: Role, *, layout: KVLayout | None = None, is_draining: bool = False) -> WorkerStatus:
    return WorkerStatus(
        name=peer.split("#")[0],
        address=f"tcp://{peer}:1",
        role=role,
        layout=layout or fake_layout(),
        num_blocks=100,
        num_free_blocks=100,
        max_context=400,
        num_waiting=0,
        num_waiting_tokens=0,
        num_running=0,
        is_draining=is_draining,
        step_running_s=0,
        step_expected_s=0,
        counters={},
    )


def descriptor(peer: PeerId, num_tokens: int, layout: KVLayout | None = None) -> KVDescriptor:
    source = KVSource(
        peer=peer,
        data_address="tcp://prefill:1",
        shm_name="",
        shm_nonce="",
        layout=layout or fake_layout(),
        num_blocks=100,
    )
    return KVDescriptor(source=source, num_tokens=num_tokens, block_ids=(BlockId(0),), checksums=(0,))


def prefill_done(request: PrefillRequest, peer: PeerId) -> PrefillDone:
    """What an honest prefill worker answers."""
    token_ids = request.prompt_token_ids + request.output_token_ids
    index = len(request.output_token_ids)
    ends = index + 1 == request.sampling.max_tokens
    return PrefillDone(
        request_id=request.request_id,
        attempt=request.attempt,
        index=index,
        token_id=next_token(token_ids, request.sampling),
        num_cached_tokens=0,
        finish_reason=FinishReason.LENGTH if ends else None,
        stop_token_id=None,
        kv=None if ends else descriptor(peer, len(token_ids)),
    )


def tokens(request: DecodeRequest, index: int, count: int) -> TokensEntry:
    """What an honest decode worker says: `count` tokens from this index of the output on."""
    output = expected_tokens(request.prompt_token_ids, request.sampling)
    new = tuple(output[index : index + count])
    ends = index + len(new) == len(output)
    return TokensEntry(
        request_id=request.request_id,
        attempt=request.attempt,
        index=index,
        token_ids=new,
        finish_reason=FinishReason.LENGTH if ends else None,
        stop_token_id=None,
    )


@dataclass
class Client:
    expected: list[int] = field(default_factory=list[int])
    token_ids: list[int] = field(default_factory=list[int])
    finish: Finish | None = None
    error: RequestError | None = None

    @property
    def is_ended(self) -> bool:
        return self.finish is not None or self.error is not None


class Bench:
    """A gateway's requests between clients and a network that the test plays."""

    def __init__(self, policy: LifePolicy = POLICY) -> None:
        self.requests = Requests(Fleet("fake-model", lambda name, reason: None), policy)
        self.now = 0.0
        self.clients: dict[RequestId, Client] = {}
        self.sent: list[tuple[PeerId, Control]] = []

    def join(self, *workers: tuple[PeerId, Role]) -> None:
        for peer, role in workers:
            self.do(Received(peer, status(peer, role)))

    def do(self, event: Event) -> list[Effect]:
        effects = self.requests.handle(event, self.now)
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self.sent.append((peer, message))
                case Emit(request_id, token_ids, finish):
                    client = self.clients[request_id]
                    assert not client.is_ended
                    client.token_ids += token_ids
                    client.finish = finish
                case Fail(request_id, error):
                    client = self.clients[request_id]
                    assert not client.is_ended
                    client.error = error
        return effects

    def submit(self, name: str = "a", sampling: SamplingParams = GREEDY) -> Client:
        client = self.clients[RequestId(name)] = Client(expected_tokens(PROMPT, sampling))
        self.do(Submit(RequestId(name), PROMPT, sampling))
        return client

    def take(self, kind: type[Control]) -> tuple[PeerId, Control]:
        """The oldest message of this kind that nobody took yet."""
        found = next(pair for pair in self.sent if isinstance(pair[1], kind))
        self.sent.remove(found)
        return found

    def prefill(self) -> None:
        peer, message = self.take(PrefillRequest)
        assert isinstance(message, PrefillRequest)
        self.do(Received(peer, prefill_done(message, peer)))

    def decode(self) -> tuple[PeerId, DecodeRequest]:
        peer, message = self.take(DecodeRequest)
        assert isinstance(message, DecodeRequest)
        return peer, message


def started() -> Bench:
    bench = Bench()
    bench.join((P0, Role.PREFILL), (D0, Role.DECODE))
    return bench


def test_tokens_come_out_in_order_and_once() -> None:
    bench = started()
    client = bench.submit()
    bench.prefill()
    peer, request = bench.decode()
    for index, count in ((1, 1), (1, 2), (2, 3), (4, 2)):
        bench.do(Received(peer, Tokens(entries=(tokens(request, index, count),))))
    assert client.token_ids == expected_tokens(PROMPT, GREEDY)
    assert client.finish == Finish(FinishReason.LENGTH)
    assert len(bench.requests) == 0


def test_a_gap_in_the_tokens_starts_the_next_attempt() -> None:
    bench = started()
    client = bench.submit()
    bench.prefill()
    peer, request = bench.decode()
    bench.do(Received(peer, Tokens(entries=(tokens(request, 2, 1),))))
    assert bench.take(Cancel) == (D0, Cancel(request_id=RequestId("a"), attempt=0))
    _, retry = bench.take(PrefillRequest)
    assert isinstance(retry, PrefillRequest)
    assert (retry.attempt, list(retry.output_token_ids)) == (1, client.token_ids)


def test_what_comes_for_another_attempt_is_answered_with_a_cancel() -> None:
    bench = started()
    client = bench.submit()
    bench.prefill()
    peer, request = bench.decode()
    stale = replace(tokens(request, 1, 1), attempt=7)
    bench.do(Received(peer, Tokens(entries=(stale,))))
    assert bench.take(Cancel) == (D0, Cancel(request_id=RequestId("a"), attempt=7))
    assert len(client.token_ids) == 1


def test_a_resumed_request_prefers_the_worker_that_computed_its_prompt() -> None:
    bench = Bench()
    bench.join((P0, Role.PREFILL), (P1, Role.PREFILL), (D0, Role.DECODE), (D1, Role.DECODE))
    bench.submit()
    first, request = bench.take(PrefillRequest)
    assert isinstance(request, PrefillRequest)
    bench.do(Received(first, prefill_done(request, first)))
    peer, _ = bench.decode()
    bench.do(LinkLost(peer, "broken"))
    again, _ = bench.take(PrefillRequest)
    assert again == first


def test_a_request_that_workers_die_of_is_given_up() -> None:
    bench = Bench()
    client = Client()
    bench.clients[RequestId("a")] = client
    bench.join((D0, Role.DECODE))
    bench.do(Submit(RequestId("a"), PROMPT, GREEDY))
    for incarnation in range(3):
        peer = PeerId(f"p#{incarnation}")
        bench.join((peer, Role.PREFILL))
        bench.do(LinkLost(peer, "broken"))
    assert client.error is not None
    assert client.error.status == 500


def test_workers_that_die_in_one_incident_count_once() -> None:
    """All are dead, but the gateway learns of it one by one, and sends the request on to the next one each time."""
    bench = Bench()
    others = [PeerId(f"p{number}#1") for number in range(1, 6)]
    bench.join((P0, Role.PREFILL), (D0, Role.DECODE), *((peer, Role.PREFILL) for peer in others))
    bench.now = 1.0
    bench.join((D1, Role.DECODE))
    client = bench.submit()
    bench.prefill()
    running, request = bench.decode()
    bench.do(Received(running, Tokens(entries=(tokens(request, 1, 1),))))
    for number, peer in enumerate([running, P0, *others, D0, D1]):
        bench.now = 2.0 + number / 1000
        bench.do(LinkLost(peer, "broken"))
    assert client.error is None
    bench.now += POLICY.resume_timeout_s - 1
    bench.do(Tick())
    bench.join((PeerId("p0#2"), Role.PREFILL), (PeerId("d0#2"), Role.DECODE))
    bench.sent = bench.sent[-1:]
    bench.prefill()
    peer, request = bench.decode()
    bench.do(Received(peer, Tokens(entries=(tokens(request, 3, 3),))))
    assert client.token_ids == client.expected


def test_a_request_that_kills_at_once_is_given_up_although_workers_had_no_time_to_say_anything() -> None:
    bench = Bench()
    peers = [PeerId(f"p{number}#0") for number in range(3)]
    bench.join((D0, Role.DECODE), *((peer, Role.PREFILL) for peer in peers))
    bench.now = 1.0
    client = bench.submit()
    num_deaths = 0
    while client.error is None:
        bench.now += 0.01
        killed, _ = bench.take(PrefillRequest)
        bench.do(LinkLost(killed, "broken"))
        num_deaths += 1
        if num_deaths % len(peers) == 0:
            bench.now += 1.0
            bench.join((D0, Role.DECODE), *((PeerId(f"{peer}{num_deaths}"), Role.PREFILL) for peer in peers))
    assert client.error.code == "too_many_attempts"
    assert num_deaths <= POLICY.max_attempts * len(peers) + 1


def test_preemptions_and_drains_do_not_count_as_failures() -> None:
    bench = started()
    client = bench.submit()
    for attempt in range(10):
        bench.prefill()
        peer, _ = bench.decode()
        if client.is_ended:
            break
        reason = EndReason.PREEMPTED if attempt % 2 else EndReason.DRAINING
        bench.do(Received(peer, Ended(request_id=RequestId("a"), attempt=attempt, reason=reason, detail="")))
        bench.join((D0, Role.DECODE))
        if len(client.token_ids) == GREEDY.max_tokens - 1:
            bench.prefill()
            break
    assert client.token_ids == expected_tokens(PROMPT, GREEDY)


@pytest.mark.parametrize("reason", [EndReason.TOO_LARGE, EndReason.REFUSED])
def test_what_no_worker_can_compute_is_the_client_s_error_and_not_tried_again(reason: EndReason) -> None:
    bench = started()
    client = bench.submit()
    detail = "the model has 10 tokens, got token id 10"
    bench.do(Received(P0, Ended(request_id=RequestId("a"), attempt=0, reason=reason, detail=detail)))
    assert client.error is not None
    assert (client.error.status, client.error.message) == (400, detail)


def test_without_a_decode_worker_no_prompt_is_started_and_the_answer_is_503() -> None:
    bench = Bench()
    bench.join((P0, Role.PREFILL))
    client = bench.submit()
    assert bench.sent == []
    for second in range(1, 8):
        bench.now = float(second)
        bench.join((P0, Role.PREFILL))
        bench.do(Tick())
    assert client.error is not None
    assert client.error.status == 503
    assert "decode" in client.error.message


def test_a_request_that_takes_too_long_is_cancelled_at_its_worker() -> None:
    bench = started()
    client = bench.submit()
    for second in range(62):
        bench.now = float(second)
        bench.join((P0, Role.PREFILL), (D0, Role.DECODE))
        bench.do(Tick())
    assert client.error is not None
    assert client.error.status == 504
    assert bench.take(Cancel) == (P0, Cancel(request_id=RequestId("a"), attempt=0))


def test_a_worker_that_refuses_because_it_drains_is_not_asked_again() -> None:
    bench = Bench()
    bench.join((P0, Role.PREFILL), (P1, Role.PREFILL), (D0, Role.DECODE))
    bench.submit()
    peer, _ = bench.take(PrefillRequest)
    bench.do(Received(peer, Ended(request_id=RequestId("a"), attempt=0, reason=EndReason.DRAINING, detail="")))
    other, _ = bench.take(PrefillRequest)
    assert other != peer
    bench.join((peer, Role.PREFILL))
    assert len(bench.requests.fleet.pool(Role.PREFILL)) == 2, "what its next status says is what counts"


def test_a_handoff_that_is_announced_twice_stays_wanted() -> None:
    bench = started()
    client = bench.submit()
    peer, request = bench.take(PrefillRequest)
    assert isinstance(request, PrefillRequest)
    for _ in range(2):
        bench.do(Received(peer, prefill_done(request, peer)))
    assert not any(isinstance(message, Cancel) for _, message in bench.sent)
    assert bench.requests.leases(P0) == ((RequestId("a"), 0),)
    assert len(client.token_ids) == 1


def test_an_abort_cancels_at_both_workers() -> None:
    bench = started()
    bench.submit()
    bench.prefill()
    bench.decode()
    bench.do(Abort(RequestId("a")))
    assert {bench.take(Cancel)[0], bench.take(Cancel)[0]} == {P0, D0}
    assert bench.do(Abort(RequestId("a"))) == []


def test_leases_name_the_handoffs_that_are_still_wanted() -> None:
    bench = started()
    bench.submit()
    assert bench.requests.leases(P0) == ()
    bench.prefill()
    assert bench.requests.leases(P0) == ((RequestId("a"), 0),)
    peer, request = bench.decode()
    bench.do(Received(peer, Tokens(entries=(tokens(request, 1, 1),))))
    assert bench.requests.leases(P0) == ()


def test_a_full_link_sends_the_request_elsewhere() -> None:
    bench = Bench()
    bench.join((P0, Role.PREFILL), (P1, Role.PREFILL), (D0, Role.DECODE))
    bench.submit()
    peer, message = bench.take(PrefillRequest)
    bench.do(LinkFull(peer, message))
    other, _ = bench.take(PrefillRequest)
    assert other != peer


def test_kv_goes_only_to_a_worker_with_the_same_layout() -> None:
    bench = started()
    bench.do(Received(D0, status(D0, Role.DECODE, layout=fake_layout(block_size=8))))
    bench.submit()
    bench.prefill()
    assert not any(isinstance(message, DecodeRequest) for _, message in bench.sent)
    bench.join((D1, Role.DECODE))
    assert bench.decode()[0] == D1
