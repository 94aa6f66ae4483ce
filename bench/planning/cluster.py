"""A deployment on a virtual clock: the policies of the real one, and times in place of what they wait for."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random

from bench.measure import RequestFigures
from bench.planning.clients import VirtualClients
from bench.planning.clock import Clock
from bench.planning.deployment import MODEL_HASH, Pools, WorkerModel
from bench.planning.host import Host
from bench.planning.transfer import VirtualTransfer
from bench.planning.worker import VirtualWorker
from bench.workload import Plan, PlannedRequest
from common.config import GatewayOptions
from common.ids import PeerId, RequestId
from common.sampling import SamplingParams
from common.service import STATUS_S, TICK_S, LinkEvent, Received, Send, Tick
from common.wire import Control, GatewayStatus, Role, Status
from gateway.fleet import Fleet
from gateway.life import LifePolicy
from gateway.requests import Event, Requests, Submit
from kvtransfer.transport import KVReleased, PullFinished, ReceiverEffect, SenderEffect, SendRelease

_GATEWAY = PeerId("gateway#0")

PrefillWorker = VirtualWorker[KVReleased, SenderEffect]
DecodeWorker = VirtualWorker[PullFinished, ReceiverEffect]


class Cluster:
    """A gateway and its workers, with cold caches, and everything that they tell each other.

    Links are FIFO, take the same time for every message and are never full.
    seed: of the router's choices, and of when each worker says how it is
    Mutable state: the clock and what is to happen; the clients of the run under way.
    """

    def __init__(self, pools: Pools, model: WorkerModel, seed: int) -> None:
        self._model = model
        self._clock = Clock()
        self._requests = Requests(Fleet(MODEL_HASH, _refuse), _life_policy(), Random(seed))
        self._transfer = VirtualTransfer(self._clock, model.pull_s, self._send_release)
        self._clients: VirtualClients | None = None
        self._num_runs = 0
        self._host = Host(self._clock) if model.shared_steps else None
        self._prefill = {peer: self._prefill_worker(peer) for peer in _peers("prefill", pools.num_prefill)}
        self._decode = {peer: self._decode_worker(peer) for peer in _peers("decode", pools.num_decode)}
        self._workers: dict[PeerId, PrefillWorker | DecodeWorker] = {**self._prefill, **self._decode}
        self._join(Random(seed))

    def _prefill_worker(self, peer: PeerId) -> PrefillWorker:
        return VirtualWorker(
            self._model.prefill_service(peer),
            *(self._clock, self._host or Host(self._clock)),
            time_of=self._model.prompt_time,
            send=partial(self._send, peer),
            apply_transfer=self._transfer.publish,
        )

    def _decode_worker(self, peer: PeerId) -> DecodeWorker:
        worker: DecodeWorker = VirtualWorker(
            self._model.decode_service(peer),
            *(self._clock, self._host or Host(self._clock)),
            time_of=self._model.decode_time,
            send=partial(self._send, peer),
            apply_transfer=lambda effect: self._transfer.apply(peer, effect, worker.hear),
            itl_target_s=self._model.itl_target_s,
        )
        return worker

    def _join(self, random: Random) -> None:
        """Until the gateway knows of all workers."""
        self._clock.every(TICK_S, lambda: self._gateway_hears(Tick()))
        self._clock.every(STATUS_S, self._tell_workers)
        for peer in self._workers:
            self._report(peer)
            self._clock.after(
                random.uniform(0, STATUS_S), partial(self._clock.every, STATUS_S, partial(self._report, peer))
            )
        self._wait_until(lambda: len(self._requests.fleet.all()) == len(self._workers))

    def run(self, plan: Plan) -> list[RequestFigures]:
        """What the plan's clients measure, in the order of the plan."""
        self._num_runs += 1
        clients = self._clients = VirtualClients(
            plan, self._clock, self._model.link_s, str(self._num_runs), self._submit
        )
        self._wait_until(lambda: clients.is_done)
        return clients.figures()

    def counters(self, role: Role) -> Counter[str]:
        """Of all workers of a pool together."""
        workers = self._prefill.values() if role is Role.PREFILL else self._decode.values()
        return sum((Counter(worker.status().counters) for worker in workers), Counter[str]())

    def busy_share(self, role: Role) -> float:
        """Of the time until now, in which a worker of a pool was in a step, on average."""
        num_workers = len(self._prefill if role is Role.PREFILL else self._decode)
        return self.counters(role)["step_seconds"] / num_workers / self._clock.now

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        self._clock.run_until(is_done, math.inf, str)

    def _submit(self, request_id: RequestId, request: PlannedRequest) -> None:
        assert not isinstance(request.prompt, str), "nobody here has a tokenizer"
        sampling = SamplingParams(max_tokens=request.spec.num_output, temperature=0, ignore_eos=True)
        self._gateway_hears(Submit(request_id, tuple(request.prompt), sampling))

    def _gateway_hears(self, event: Event) -> None:
        for effect in self._requests.handle(event, self._clock.now):
            if isinstance(effect, Send):
                self._send(_GATEWAY, effect.peer, effect.message)
            else:
                assert self._clients is not None, "who was not asked says nothing"
                self._clients.hear(effect)

    def _send(self, sender: PeerId, to: PeerId, message: Control | Status) -> None:
        self._clock.after(self._model.link_s, lambda: self._deliver(to, Received(sender, message)))

    def _deliver(self, to: PeerId, event: LinkEvent) -> None:
        if to == _GATEWAY:
            self._gateway_hears(event)
        else:
            self._workers[to].hear(event)

    def _send_release(self, release: SendRelease) -> None:
        holder = self._prefill[release.source.peer]
        self._clock.after(self._model.link_s, lambda: holder.hear(KVReleased(release.key)))

    def _report(self, peer: PeerId) -> None:
        self._send(peer, _GATEWAY, self._workers[peer].status())

    def _tell_workers(self) -> None:
        for peer in self._workers:
            self._send(
                _GATEWAY,
                peer,
                GatewayStatus(name="gateway", address="tcp://gateway:1", leases=self._requests.leases(peer)),
            )


def _peers(role: str, num: int) -> list[PeerId]:
    return [PeerId(f"{role}-{index}#0") for index in range(num)]


def _life_policy() -> LifePolicy:
    """Of a gateway with default options."""
    options = GatewayOptions()
    return LifePolicy(
        max_concurrent_requests=options.max_concurrent_requests,
        request_timeout_s=options.request_timeout,
        when_no_prefill=options.when_no_prefill,
        no_worker_timeout_s=options.no_worker_timeout,
        resume_timeout_s=options.resume_timeout,
        max_attempts=options.max_attempts,
    )


def _refuse(name: str, problem: str) -> None:
    raise AssertionError(f"{name}: {problem}")
