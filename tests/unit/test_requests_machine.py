"""The life of requests against workers and a network that do anything in any order."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.ids import PeerId, RequestId
from common.sampling import FinishReason, SamplingParams
from common.service import LinkFull, LinkLost, Received, Send, Tick
from common.wire import (
    Cancel,
    DecodeRequest,
    Ended,
    EndReason,
    PrefillDone,
    PrefillRequest,
    Role,
    Tokens,
    TokensEntry,
)
from gateway.fleet import WORKER_TIMEOUT_S
from gateway.requests import Abort
from tests.unit.requests_rig import POLICY, Bench, Client, descriptor, prefill_done, tokens

STRANGER = PeerId("stranger#1")
NO_REQUEST = RequestId("nobody")


class LifeMachine(RuleBasedStateMachine):
    """Honest workers on a network that delays, repeats, drops with notice, and kills."""

    @initialize()
    def start(self) -> None:
        self.bench = Bench()
        self.count = 0
        self.incarnation = 0
        self.alive: dict[PeerId, Role] = {}
        self.deadline_s: dict[RequestId, float] = {}
        self.decoding: dict[tuple[PeerId, RequestId, int], tuple[DecodeRequest | PrefillRequest, int]] = {}

    @rule(role=st.sampled_from(list(Role)))
    def join(self, role: Role) -> None:
        if len(self.alive) < 4:
            self.incarnation += 1
            peer = PeerId(f"w#{self.incarnation}")
            self.alive[peer] = role
            self.bench.join((peer, role))

    @rule(max_tokens=st.integers(1, 6), seed=st.integers(0, 3))
    def submit(self, max_tokens: int, seed: int) -> None:
        if self.count < 12:
            self.count += 1
            name = f"r{self.count}"
            self.bench.submit(name, SamplingParams(max_tokens=max_tokens, temperature=seed % 2, seed=seed))
            self.deadline_s[RequestId(name)] = self.bench.now + POLICY.request_timeout_s

    @rule(data=st.data(), keeps=st.booleans())
    def a_worker_hears_something(self, data: st.DataObject, keeps: bool) -> None:
        """Any message may arrive next, over different links; with `keeps` it arrives again later."""
        if not self.bench.sent:
            return
        peer, message = data.draw(st.sampled_from(self.bench.sent))
        if not keeps:
            self.bench.sent.remove((peer, message))
        if peer not in self.alive:
            return
        if isinstance(message, PrefillRequest):
            done = prefill_done(message, peer, self.alive[peer])
            if self.alive[peer] is Role.BOTH and not done.finish_reason:
                self.decoding.setdefault((peer, message.request_id, message.attempt), (message, done.index + 1))
            self.bench.do(Received(peer, done))
        elif isinstance(message, DecodeRequest):
            first = len(message.output_token_ids)
            self.decoding.setdefault((peer, message.request_id, message.attempt), (message, first))
        elif isinstance(message, Cancel):
            for key in [k for k in self.decoding if k[0] == peer and k[1] == message.request_id]:
                if key[2] <= message.attempt:
                    del self.decoding[key]

    @rule(data=st.data(), count=st.integers(1, 3), repeats=st.booleans())
    def a_worker_decodes(self, data: st.DataObject, count: int, repeats: bool) -> None:
        if not self.decoding:
            return
        key = data.draw(st.sampled_from(sorted(self.decoding)))
        request, index = self.decoding[key]
        entry = tokens(request, index, count)
        if entry.finish_reason:
            del self.decoding[key]
        else:
            self.decoding[key] = (request, index if repeats else index + len(entry.token_ids))
        self.bench.do(Received(key[0], Tokens(entries=(entry,))))

    @rule(data=st.data(), reason=st.sampled_from([EndReason.PREEMPTED, EndReason.DRAINING, EndReason.TRANSFER]))
    def a_worker_gives_up(self, data: st.DataObject, reason: EndReason) -> None:
        if self.decoding:
            key = data.draw(st.sampled_from(sorted(self.decoding)))
            del self.decoding[key]
            ended = Ended(request_id=key[1], attempt=key[2], reason=reason, detail="")
            self.bench.do(Received(key[0], ended))

    @rule(data=st.data(), dies=st.booleans())
    def lose(self, data: st.DataObject, dies: bool) -> None:
        """A link breaks; with `dies` the worker at its other end is gone."""
        if self.alive:
            peer = data.draw(st.sampled_from(sorted(self.alive)))
            self.bench.sent = [pair for pair in self.bench.sent if pair[0] != peer]
            self.decoding = {key: value for key, value in self.decoding.items() if key[0] != peer}
            role = self.alive.pop(peer)
            self.bench.do(LinkLost(peer, "broken"))
            if not dies:
                self.alive[peer] = role
                self.bench.join((peer, role))

    @rule()
    def a_link_is_full(self) -> None:
        """What was sent last did not go out; the worker is heard of again."""
        if self.bench.sent and (peer := self.bench.sent[-1][0]) in self.alive:
            self.bench.do(LinkFull(*self.bench.sent.pop()))
            self.bench.join((peer, self.alive[peer]))

    @rule(
        data=st.data(),
        attempt=st.sampled_from([0, 0, 1, 2, 99]),
        index=st.integers(0, 7),
        kind=st.sampled_from([PrefillDone, TokensEntry, Ended]),
    )
    def somebody_says_something_at_a_wrong_moment(
        self, data: st.DataObject, attempt: int, index: int, kind: type[PrefillDone | TokensEntry | Ended]
    ) -> None:
        """What it says of the model's output is true; whether it may say so is another matter."""
        peer = data.draw(st.sampled_from([*sorted(self.alive), STRANGER]))
        request_id = data.draw(st.sampled_from([*sorted(self.bench.clients), NO_REQUEST]))
        client = self.bench.clients.get(request_id) or Client(expected=[1, 2, 3])
        message = misplaced(kind, request_id, attempt, index, client.expected, peer)
        is_stale = peer == STRANGER or attempt == 99 or request_id == NO_REQUEST or client.is_ended
        event = Received(peer, Tokens(entries=(message,)) if isinstance(message, TokensEntry) else message)
        effects = self.bench.do(event)
        if is_stale and isinstance(message, Ended):
            assert effects == []
        elif is_stale:
            assert effects == [Send(peer, Cancel(request_id=request_id, attempt=attempt))]

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        open_ids = sorted(name for name, client in self.bench.clients.items() if not client.is_ended)
        if open_ids:
            request_id = data.draw(st.sampled_from(open_ids))
            self.bench.do(Abort(request_id))
            del self.bench.clients[request_id]
            del self.deadline_s[request_id]

    @rule(seconds=st.sampled_from([0.1, 0.5, WORKER_TIMEOUT_S + 0.1]))
    def wait(self, seconds: float) -> None:
        """Statuses arrive in time, unless the pause is too long for them."""
        self.bench.now += seconds
        if seconds < WORKER_TIMEOUT_S:
            self.bench.join(*self.alive.items())
        self.bench.do(Tick())
        self.bench.join(*self.alive.items())

    @invariant()
    def clients_see_a_prefix_of_what_the_model_says(self) -> None:
        if not hasattr(self, "bench"):
            return
        for client in self.bench.clients.values():
            assert client.token_ids == client.expected[: len(client.token_ids)]
            assert client.finish is None or client.token_ids == client.expected
        assert len(self.bench.requests) == sum(not client.is_ended for client in self.bench.clients.values())
        for name, client in self.bench.clients.items():
            assert client.is_ended or self.bench.now <= self.deadline_s[name] + WORKER_TIMEOUT_S + 0.2

    def teardown(self) -> None:
        """Once all workers are gone, every request ends by its deadline."""
        if not hasattr(self, "bench"):
            return
        for peer in list(self.alive):
            self.bench.do(LinkLost(peer, "broken"))
        for _ in range(100):
            self.bench.now += 0.5
            self.bench.do(Tick())
        assert all(client.is_ended for client in self.bench.clients.values())
        assert len(self.bench.requests) == 0


def misplaced(
    kind: type[PrefillDone | TokensEntry | Ended],
    request_id: RequestId,
    attempt: int,
    index: int,
    output: list[int],
    peer: PeerId,
) -> PrefillDone | TokensEntry | Ended:
    new = tuple(output[index : index + 2])
    if kind is Ended or not new:
        return Ended(request_id=request_id, attempt=attempt, reason=EndReason.LINK_LOST, detail="confused")
    if kind is TokensEntry:
        ends = index + len(new) == len(output)
        return TokensEntry(
            request_id=request_id,
            attempt=attempt,
            index=index,
            token_ids=new,
            finish_reason=FinishReason.LENGTH if ends else None,
            stop_token_id=None,
        )
    ends = index + 1 == len(output)
    return PrefillDone(
        request_id=request_id,
        attempt=attempt,
        index=index,
        token_id=new[0],
        num_cached_tokens=0,
        finish_reason=FinishReason.LENGTH if ends else None,
        stop_token_id=None,
        kv=None if ends else descriptor(peer, 5 + index),
    )


LifeMachine.TestCase.settings = settings(stateful_step_count=60, max_examples=60)
TestLifeMachine = LifeMachine.TestCase
