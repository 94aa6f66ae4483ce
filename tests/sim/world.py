"""The whole ring in one process: the real services and their links on a virtual clock, over an in-memory network.

A seed fixes every delay and fault, so a run that failed fails again. Nothing here sleeps or opens a socket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from random import Random
from unittest.mock import patch

import zmq

import common.links
import kvtransfer.puller
import kvtransfer.server
import kvtransfer.tcp
from bench.planning.clock import Clock
from common.ids import PeerId, RequestId
from common.kv_layout import KVLayout
from common.sampling import SamplingParams
from common.wire import Buffer, Role, decode
from tests.fakes import expected_tokens, fake_layout
from tests.sim.gateway import Client, Gateway
from tests.sim.network import Network
from tests.sim.plan import Arrival, Plan, WorkerPlan
from tests.sim.process import Process
from tests.sim.sockets import Poller, SimThread
from tests.sim.trace import Brief
from tests.sim.worker import Worker

FETCH_BLOCKS = 2
"""Blocks of a fetch, and half as many of a run: so that a pull of few blocks takes several messages."""


class World:
    """The virtual clock, the network and everybody who is alive.

    trace:  takes a format and its arguments for everything that happens
    Mutable state: live processes by name, clients, and requests that kill who runs them.
    """

    def __init__(self, plan: Plan, log: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.random = Random(plan.seed)
        self.clock = Clock()
        self.network = Network(self.clock, self.random, self._trace_message)
        self.processes: dict[str, Gateway | Worker] = {}
        self.clients: list[Client] = []
        self.poisons: set[RequestId] = set()
        self._log = log
        self._incarnations = count()
        self._worker_plans: dict[str, WorkerPlan] = {}
        self.layout: KVLayout = fake_layout(num_kv_heads=plan.num_heads)
        for name in plan.gateways:
            self.start_gateway(name)
        for worker in plan.workers:
            self.start_worker(worker)

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def workers(self) -> list[Worker]:
        return [process for process in self.processes.values() if isinstance(process, Worker)]

    @property
    def gateways(self) -> list[Gateway]:
        return [process for process in self.processes.values() if isinstance(process, Gateway)]

    @property
    def requests(self) -> int:
        return sum(len(gateway.requests) for gateway in self.gateways)

    def pool(self, role: Role) -> list[Worker]:
        return [worker for worker in self.workers if worker.role is role]

    def trace(self, text: str, *args: object) -> None:
        if self._log:
            self._log(f"{self.now:9.4f} {text % args}")

    def _trace_message(self, sender: Process, to: Process, frames: list[Buffer], fate: str) -> None:
        if self._log:
            envelope = decode(frames)
            addressee = envelope.to or "anybody"
            self.trace(
                "%s > %s (%s) %d %s %s", sender.peer, to.peer, addressee, envelope.seq, Brief(envelope.message), fate
            )

    def start_gateway(self, name: str) -> Gateway:
        gateway = Gateway(self, name, self._new_peer(name))
        self._add(gateway)
        return gateway

    def start_worker(self, plan: WorkerPlan) -> Worker:
        self._worker_plans[plan.name] = plan
        worker = Worker(self, plan, self._new_peer(plan.name))
        self._add(worker)
        return worker

    def _new_peer(self, name: str) -> PeerId:
        return PeerId(f"{name}#{next(self._incarnations)}")

    def _add(self, process: Gateway | Worker) -> None:
        assert process.name not in self.processes
        self.processes[process.name] = process
        self.trace("%s starts", process.peer)
        process.begin(process.start)

    def start_again(self, name: str) -> None:
        """Another incarnation, unless there is one already."""
        if name in self.processes:
            return
        if name in self._worker_plans:
            self.start_worker(self._worker_plans[name])
        else:
            self.start_gateway(name)

    def kill(self, process: Gateway | Worker, *, silently: bool = False) -> None:
        """It is gone; connections break, which is noticed later where its host is gone as well."""
        if not process.is_alive:
            return
        self.trace("%s dies", process.peer)
        process.die()
        self.network.end(process, silently=silently)
        self._forget(process)

    def killed(self, worker: Worker) -> None:
        """By what it ran. Whoever watches over it starts it again."""
        self.kill(worker)
        self.clock.after(self.random.uniform(0.1, 1.0), lambda: self.start_again(worker.name))

    def end(self, process: Gateway | Worker) -> None:
        """It has closed its links and leaves."""
        self.trace("%s leaves", process.peer)
        process.die()
        self.network.end(process, silently=False)
        self._forget(process)

    def _forget(self, process: Gateway | Worker) -> None:
        if self.processes.get(process.name) is process:
            del self.processes[process.name]

    def freeze(self, process: Gateway | Worker, duration_s: float, *, timers_first: bool = False) -> None:
        self.trace("%s is frozen for %s s", process.peer, duration_s)
        process.freeze(duration_s, timers_first=timers_first)
        self.network.pause(process.name, None, duration_s)
        self.clock.after(duration_s, self.network.connect_again)

    def submit(self, arrival: Arrival) -> Client:
        prompt = tuple((arrival.family + 1) * 1000 + index for index in range(arrival.num_prompt))
        sampling = SamplingParams(
            max_tokens=arrival.max_tokens, temperature=0.0 if arrival.is_greedy else 1.0, seed=arrival.family
        )
        client = Client(prompt, sampling, expected_tokens(prompt, sampling), arrival.gateway, arrival.is_poison)
        gateway = self.processes.get(arrival.gateway)
        if isinstance(gateway, Gateway):
            self.clients.append(client)
            self.trace("a client asks %s for %s", gateway.peer, arrival)
            gateway.submit(client, arrival.pause_s)
            if arrival.leaves_s is not None:
                self.clock.after(arrival.leaves_s, lambda: gateway.leave(client))
        return client

    def run_until(self, is_done: Callable[[], bool], limit_s: float) -> None:
        self.clock.run_until(is_done, limit_s, lambda: self.clients)

    def run_until_ended(self, limit_s: float) -> None:
        """Until every client has its terminal frame. Fails when the clock has passed limit_s before."""
        self.run_until(lambda: all(client.is_ended for client in self.clients), limit_s)

    def unrest(self) -> str:
        """What is left somewhere when no client wants anything any more; "" for nothing."""
        return next(filter(None, (process.unrest() for process in self.processes.values())), "")


@contextmanager
def simulated(world_of: Callable[[], World]) -> Iterator[World]:
    """What threads and sockets are meanwhile is simulated, and the time is the world's."""
    clock: list[Clock] = []
    block_bytes = fake_layout().block_bytes

    def monotonic() -> float:
        return clock[0].now if clock else 0.0

    with ExitStack() as stack:
        for module in (common.links, kvtransfer.puller, kvtransfer.server):
            stack.enter_context(patch.object(module, "SocketThread", SimThread))
        stack.enter_context(patch.object(zmq, "Poller", Poller))
        stack.enter_context(patch.object(time, "monotonic", monotonic))
        stack.enter_context(patch.object(kvtransfer.server, "RUN_BYTES", FETCH_BLOCKS // 2 * block_bytes))
        stack.enter_context(patch.object(kvtransfer.tcp.TcpRoute, "fetch_bytes", FETCH_BLOCKS * block_bytes))
        world = world_of()
        clock.append(world.clock)
        yield world
