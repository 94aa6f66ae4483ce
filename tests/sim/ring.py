"""The whole ring in one process: real services on a virtual clock, over an in-memory network.

A seed fixes every delay, so a run that failed fails again. Nothing here sleeps or opens a socket.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

import xxhash

from common.engine.block_manager import BlockManager
from common.engine.step import StepPlan
from common.engine.worker import WorkerIdentity
from common.errors import RequestError
from common.ids import PeerId, RequestId, SequenceKey
from common.sampling import Finish, SamplingParams
from common.service import TICK_S, LinkLost, Received, Send, Tick
from common.wire import Control, Envelope, GatewayStatus, KVSource, Role, Status, decode, encode
from decode.scheduler import DecodeScheduler
from decode.service import DecodeService
from gateway.fleet import Fleet
from gateway.life import LifePolicy
from gateway.requests import Abort, Emit, Fail, Requests, Submit
from kvtransfer.transport import AbortPull, KVReleased, Publish, PullFinished, SendRelease, StartPull, Withdraw
from prefill.scheduler import PrefillScheduler
from prefill.service import PrefillService
from tests.fakes import FakeRunner, fake_layout

STATUS_S = 0.5
STEP_S = 0.01
MAX_DELAY_S = 0.02
BREAK_NOTICED_S = 0.05
GATEWAY = PeerId("gateway#0")


@dataclass
class Client:
    """What one client saw."""

    token_ids: list[int] = field(default_factory=list[int])
    num_cached_tokens: int = 0
    finish: Finish | None = None
    error: RequestError | None = None
    ended_s: float = 0.0

    @property
    def is_ended(self) -> bool:
        return self.finish is not None or self.error is not None


class World:
    """The virtual clock, the network and everybody who is alive.

    Mutable state: a heap of what is to happen; live workers by peer; per directed link the time of the last
    arrival, so that a link keeps its order while different links overtake each other.
    """

    def __init__(self, seed: int, policy: LifePolicy) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self._order = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._last_arrival_s: dict[tuple[PeerId, PeerId], float] = {}
        self.workers: dict[PeerId, Worker] = {}
        self.clients: dict[RequestId, Client] = {}
        self.refused: list[str] = []
        self.requests = Requests(Fleet("fake-model", lambda name, _: self.refused.append(name)), policy)
        self._every(TICK_S, lambda: self._gateway_does(self.requests.handle(Tick(), self.now)))
        self._every(STATUS_S, self._send_gateway_statuses)

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when_s, next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def _every(self, period_s: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self.after(period_s, again)

        self.after(period_s, again)

    def run_until(self, is_done: Callable[[], bool], limit_s: float) -> None:
        """Let time pass. Fails when it is not done by then."""
        while not is_done():
            assert self.now <= limit_s, f"not done after {limit_s} virtual seconds: {self.clients}"
            self.now, _, action = heapq.heappop(self._agenda)
            action()

    def run_for(self, duration_s: float) -> None:
        end_s = self.now + duration_s
        self.run_until(lambda: self._agenda[0][0] > end_s, end_s)

    def run_until_ended(self, limit_s: float = 120.0) -> None:
        self.run_until(lambda: all(client.is_ended for client in self.clients.values()), limit_s)

    def start_worker(self, role: Role, name: str, num_blocks: int = 64, max_batch_tokens: int = 16) -> "Worker":
        worker = Worker(self, role, PeerId(f"{name}#{next(self._order)}"), num_blocks, max_batch_tokens)
        self.workers[worker.peer] = worker
        worker.start()
        return worker

    def kill(self, worker: "Worker") -> None:
        """It is gone, with everything on the way to and from it; the broken connection is noticed a little later."""
        del self.workers[worker.peer]
        self.after(BREAK_NOTICED_S, lambda: self._gateway_hears(LinkLost(worker.peer, "connection broken")))

    def submit(self, name: str, prompt: tuple[int, ...], sampling: SamplingParams) -> Client:
        request_id = RequestId(name)
        self.clients[request_id] = Client()
        self._gateway_does(self.requests.handle(Submit(request_id, prompt, sampling), self.now))
        return self.clients[request_id]

    def abort(self, name: str) -> None:
        self.clients.pop(RequestId(name), None)
        self._gateway_does(self.requests.handle(Abort(RequestId(name)), self.now))

    def send(self, sender: PeerId, to: PeerId, message: Control | Status) -> None:
        """In order on this link, after a random delay, through the real encoding."""
        frames = encode(Envelope(sender, to, 0, message))
        arrival_s = max(self.now + self.random.uniform(0, MAX_DELAY_S), self._last_arrival_s.get((sender, to), 0.0))
        self._last_arrival_s[sender, to] = arrival_s
        self.at(arrival_s, lambda: self._arrive(to, Received(sender, decode(frames).message)))  # type: ignore[arg-type]

    def _arrive(self, to: PeerId, event: Received) -> None:
        if to == GATEWAY:
            if event.peer in self.workers:
                self._gateway_hears(event)
        elif worker := self.workers.get(to):
            worker.hear(event)

    def _gateway_hears(self, event: Received | LinkLost) -> None:
        self._gateway_does(self.requests.handle(event, self.now))

    def _gateway_does(self, effects: list[Send | Emit | Fail]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self.send(GATEWAY, peer, message)
                case Emit():
                    self._show(effect)
                case Fail(request_id, error):
                    self._end(request_id).error = error

    def _show(self, emit: Emit) -> None:
        client = self._end(emit.request_id) if emit.finish else self._client(emit.request_id)
        client.token_ids += emit.token_ids
        client.finish = emit.finish
        client.num_cached_tokens = emit.num_cached_tokens

    def _client(self, request_id: RequestId) -> Client:
        client = self.clients[request_id]
        assert not client.is_ended, f"{request_id} heard something after its terminal frame"
        return client

    def _end(self, request_id: RequestId) -> Client:
        client = self._client(request_id)
        client.ended_s = self.now
        return client

    def _send_gateway_statuses(self) -> None:
        for peer in list(self.workers):
            status = GatewayStatus(name="gateway", address="sim", leases=self.requests.leases(peer))
            self.send(GATEWAY, peer, status)


class Worker:
    """One worker: a real service, a fake runner, and its side of the KV transfer.

    Mutable state: whether a step is under way; published handoffs (prefill) or pulls to abort (decode).
    """

    def __init__(self, world: World, role: Role, peer: PeerId, num_blocks: int, max_batch_tokens: int) -> None:
        self.world, self.role, self.peer = world, role, peer
        layout = fake_layout()
        self.runner = FakeRunner(num_blocks, layout)
        self.blocks = BlockManager(num_blocks, layout.block_size)
        identity = WorkerIdentity(peer.split("#")[0], f"sim://{peer}", layout, num_blocks)
        self.service: PrefillService | DecodeService
        if role is Role.PREFILL:
            source = KVSource(
                peer=peer, data_address="", shm_name="", shm_nonce="", layout=layout, num_blocks=num_blocks
            )
            scheduler = PrefillScheduler(self.blocks, max_batch_tokens=max_batch_tokens, max_step_s=0, lease_s=5)
            self.service = PrefillService(identity, source, self.blocks, scheduler)
        else:
            self.service = DecodeService(identity, self.blocks, DecodeScheduler(self.blocks, max_num_seqs=16))
        self.published: dict[SequenceKey, tuple[int, ...]] = {}
        self.aborted: set[SequenceKey] = set()
        self._is_stepping = False

    @property
    def is_alive(self) -> bool:
        return self.world.workers.get(self.peer) is self

    def start(self) -> None:
        self._report()
        self._tick()

    def _report(self) -> None:
        if self.is_alive:
            self.world.send(self.peer, GATEWAY, self.service.status(self.world.now))
            self.world.after(STATUS_S, self._report)

    def _tick(self) -> None:
        if self.is_alive:
            self.hear(Tick())
            self.world.after(TICK_S, self._tick)

    def hear(self, event: Received | LinkLost | Tick | PullFinished | KVReleased) -> None:
        if not self.is_alive:
            return
        self._do(self.service.handle(event, self.world.now))  # type: ignore[arg-type]
        self._step()

    def drain(self) -> None:
        self._do(self.service.drain())

    def _step(self) -> None:
        if self._is_stepping:
            return
        plan, effects = self.service.plan(self.world.now)
        self._do(effects)
        if plan:
            self._is_stepping = True
            self.world.after(STEP_S, lambda: self._complete(plan))

    def _complete(self, plan: StepPlan) -> None:
        """Events wait while a step runs, as they do in the real loop: execution and completion are one instant."""
        if not self.is_alive:
            return
        self._is_stepping = False
        self._do(self.service.complete(plan, self.runner.execute(plan), self.world.now))
        self._step()

    def _do(self, effects: list) -> None:  # type: ignore[type-arg]
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self.world.send(self.peer, peer, message)
                case Publish(key, block_ids):
                    self.published[key] = block_ids
                case Withdraw(key):
                    self.published.pop(key, None)
                case StartPull():
                    self.world.after(self.world.random.uniform(0, 5 * MAX_DELAY_S), lambda e=effect: self._pull(e))
                case AbortPull(key):
                    self.aborted.add(key)
                case SendRelease(key, source):
                    self.world.after(
                        self.world.random.uniform(0, MAX_DELAY_S), lambda k=key, s=source: self._release(k, s)
                    )

    def _pull(self, pull: StartPull) -> None:
        error = self._copy(pull)
        self.hear(PullFinished(pull.key, error, 0 if error else len(pull.copies) * self.runner.layout.block_bytes))

    def _copy(self, pull: StartPull) -> str:
        """Copy and verify; returns what went wrong, "" for nothing."""
        source = self.world.workers.get(pull.kv.source.peer)
        if pull.key in self.aborted:
            self.aborted.remove(pull.key)
            return "aborted"
        if source is None or pull.key not in source.published:
            return "the handoff is not held any more"
        for copy in pull.copies:
            assert copy.source in source.published[pull.key]
            self.runner.block(copy.target)[:] = source.runner.block(copy.source)
            if xxhash.xxh3_64_intdigest(self.runner.block(copy.target)) != copy.checksum:
                return "checksum mismatch"
        return ""

    def _release(self, key: SequenceKey, source: KVSource) -> None:
        if worker := self.world.workers.get(source.peer):
            worker.hear(KVReleased(key))
