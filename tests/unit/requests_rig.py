"""A gateway's requests between clients and a network that the test plays."""

from dataclasses import dataclass, field
from random import Random

from common.errors import RequestError
from common.ids import BlockId, PeerId, RequestId
from common.kv_layout import KVLayout
from common.kv_source import KVDescriptor
from common.sampling import Finish, FinishReason, SamplingParams
from common.service import Received, Send
from common.wire import (
    Control,
    DecodeRequest,
    PrefillDone,
    PrefillRequest,
    Role,
    TokensEntry,
    WorkerStatus,
)
from gateway.fleet import Fleet
from gateway.life import LifePolicy
from gateway.requests import Effect, Emit, Event, Fail, Requests, Submit
from tests.fakes import expected_tokens, fake_layout, fake_source, next_token

POLICY = LifePolicy(
    max_concurrent_requests=100,
    request_timeout_s=60,
    when_no_prefill="queue",
    no_worker_timeout_s=5,
    resume_timeout_s=8,
    max_attempts=3,
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
    source = fake_source(peer, layout or fake_layout(), num_blocks=100)
    return KVDescriptor(source=source, num_tokens=num_tokens, block_ids=(BlockId(0),), checksums=((0,),))


def prefill_done(request: PrefillRequest, peer: PeerId, role: Role = Role.PREFILL) -> PrefillDone:
    """What an honest worker answers that computes prompts."""
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
        kv=None if ends or role is Role.BOTH else descriptor(peer, len(token_ids)),
    )


def tokens(request: DecodeRequest | PrefillRequest, index: int, count: int) -> TokensEntry:
    """What an honest worker says that decodes: `count` tokens from this index of the output on."""
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
        self.requests = Requests(Fleet("fake-model", lambda name, reason: None), policy, Random(0))
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
