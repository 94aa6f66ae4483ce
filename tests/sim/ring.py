"""The whole ring in one process: real services on a virtual clock, over an in-memory network.

A seed fixes every delay and fault, so a run that failed fails again. Nothing here sleeps or opens a socket.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

from bench.planning.clock import Clock
from common.errors import RequestError
from common.ids import PeerId, RequestId
from common.sampling import Finish, SamplingParams
from common.service import TICK_S, LinkEvent, LinkFull, LinkLost, Send, Tick
from common.wire import GatewayStatus, Role
from gateway.fleet import Fleet
from gateway.life import LifePolicy
from gateway.requests import Abort, Emit, Event, Fail, Requests, Submit
from tests.sim.network import Network
from tests.sim.worker import GATEWAY, STATUS_S, Worker

BREAK_NOTICED_S = 0.1


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

    Mutable state: live workers and clients; who is frozen until when, and what waits for them.
    """

    def __init__(self, seed: int, policy: LifePolicy) -> None:
        self.random = Random(seed)
        self.clock = Clock()
        self.network = Network(self.clock, self.random, self._deliver)
        self.workers: dict[PeerId, Worker] = {}
        self.clients: dict[RequestId, Client] = {}
        self.requests = Requests(Fleet("fake-model", self._refuse), policy, Random(seed))
        self._incarnations = count()
        self._frozen_until_s: dict[PeerId, float] = {}
        self._held: dict[PeerId, list[Callable[[], None]]] = {}
        self.clock.every(TICK_S, lambda: self.is_frozen(GATEWAY) or self._gateway_hears(Tick()))
        self.clock.every(STATUS_S, self._send_gateway_statuses)

    @property
    def now(self) -> float:
        return self.clock.now

    def run_for(self, duration_s: float) -> None:
        self.clock.run_for(duration_s)

    def run_until(self, is_done: Callable[[], bool], limit_s: float) -> None:
        self.clock.run_until(is_done, limit_s, lambda: self.clients)

    def run_until_ended(self, limit_s: float = 120.0) -> None:
        self.run_until(lambda: all(client.is_ended for client in self.clients.values()), limit_s)

    def pool(self, role: Role) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.role is role]

    def start_worker(self, role: Role, name: str, num_blocks: int = 64, max_batch_tokens: int = 16) -> Worker:
        peer = PeerId(f"{name}#{next(self._incarnations)}")
        worker = Worker(self, role, peer, num_blocks, max_batch_tokens)
        self.workers[peer] = worker
        worker.start()
        return worker

    def kill(self, worker: Worker) -> None:
        """It is gone, with everything on the way to and from it; the broken connection is noticed a little later."""
        del self.workers[worker.peer]
        lost = LinkLost(worker.peer, "connection broken")
        noticed_s = self.random.uniform(0, BREAK_NOTICED_S)
        self.clock.after(noticed_s, lambda: self.when_awake(GATEWAY, lambda: self._gateway_hears(lost)))

    def restart(self, worker: Worker) -> Worker:
        """It dies, and another incarnation is there before anybody has noticed."""
        self.kill(worker)
        return self.start_worker(worker.role, worker.name, worker.blocks.num_blocks, worker.max_batch_tokens)

    def freeze(self, peer: PeerId, duration_s: float) -> None:
        """It neither computes nor listens for a while; then it finds all that came meanwhile."""
        self._frozen_until_s[peer] = max(self._frozen_until_s.get(peer, 0.0), self.now + duration_s)
        self.clock.at(self._frozen_until_s[peer], lambda: self._thaw(peer))

    def is_frozen(self, peer: PeerId) -> bool:
        return self._frozen_until_s.get(peer, 0.0) > self.now

    def _thaw(self, peer: PeerId) -> None:
        """Its clock may tell it how late it is before it looks at what has come."""
        if self.is_frozen(peer):
            return
        held = self._held.pop(peer, [])
        if peer == GATEWAY and self.random.random() < 0.5:
            self._gateway_hears(Tick())
        for action in held:
            action()

    def when_awake(self, peer: PeerId, action: Callable[[], None]) -> None:
        """Now, or once it is not frozen any more."""
        if self.is_frozen(peer):
            self._held.setdefault(peer, []).append(action)
        else:
            action()

    def submit(self, name: str, prompt: tuple[int, ...], sampling: SamplingParams) -> Client:
        request_id = RequestId(name)
        self.clients[request_id] = Client()
        self._gateway_hears(Submit(request_id, prompt, sampling))
        return self.clients[request_id]

    def abort(self, name: str) -> None:
        self.clients.pop(RequestId(name), None)
        self._gateway_hears(Abort(RequestId(name)))

    def _deliver(self, to: PeerId, event: LinkEvent) -> None:
        if to != GATEWAY:
            self.when_awake(to, lambda: self._worker_hears(to, event))
        elif event.peer in self.workers:
            self.when_awake(to, lambda: self._gateway_hears(event))

    def _worker_hears(self, to: PeerId, event: LinkEvent) -> None:
        if worker := self.workers.get(to):
            worker.hear(event)

    def _gateway_hears(self, event: Event) -> None:
        """What a full link refuses is an event of its own, after everything that the first one brought."""
        events = deque([event])
        while events:
            for effect in self.requests.handle(events.popleft(), self.now):
                match effect:
                    case Send(peer, message):
                        if not self.network.send(GATEWAY, peer, message):
                            events.append(LinkFull(peer, message))
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
        if self.is_frozen(GATEWAY):
            return
        for peer in list(self.workers):
            status = GatewayStatus(name="gateway", address="tcp://gateway:1", leases=self.requests.leases(peer))
            self.network.send(GATEWAY, peer, status)

    def _refuse(self, name: str, problem: str) -> None:
        raise AssertionError(f"{name}: {problem}")
