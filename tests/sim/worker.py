"""A worker of the simulated ring: everything that the real process has above its sockets, with a fake model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import TYPE_CHECKING, Any

from aggregated.service import AggregatedService
from common.engine.block_manager import BlockManager
from common.engine.gateway_watch import GatewayWatch
from common.engine.worker import WorkerIdentity
from common.engine.worker_loop import Stop, WorkerLoop
from common.errors import GroupFailed
from common.ids import PeerId, SequenceKey
from common.links import Links
from common.wire import Control, Ended, EndReason, Role, WorkerStatus
from decode.scheduler import DecodeScheduler
from decode.service import DecodeService
from kvtransfer.transport import AbortPull, KVReleased, Publish, PullFinished, SendRelease, StartPull, Withdraw
from prefill.scheduler import PrefillScheduler
from prefill.service import PrefillService
from tests.fakes import MAX_MODEL_LEN, VOCAB_SIZE
from tests.sim.cache import Cache, Died, Guard, Runner, num_references
from tests.sim.plan import WorkerPlan
from tests.sim.process import Process
from tests.sim.sockets import owned_by
from tests.sim.trace import Brief
from tests.sim.transfer import make_receiver, make_sender

if TYPE_CHECKING:
    from tests.sim.world import World

MAX_NUM_SEQS = 16


class Inbox:
    """Stands for a `SimpleQueue`. Mutable state: events in the order in which they came."""

    def __init__(self, on_put: Callable[[], None]) -> None:
        self._events: deque[object] = deque()
        self._on_put = on_put

    def put(self, event: object) -> None:
        self._events.append(event)
        self._on_put()

    def get_nowait(self) -> object:
        if not self._events:
            raise Empty
        return self._events.popleft()


class Worker(Process):
    """One incarnation.

    Mutable state: until when the main thread computes; what it has published; sequences as of the last event: whom it
    has at all once it was told to stop, those that waited, and the ages of those that ran.
    """

    def __init__(self, world: World, plan: WorkerPlan, peer: PeerId) -> None:
        super().__init__(world.clock, plan.name, peer)
        self.world, self.plan, self.role = world, plan, plan.role
        layout = world.layout
        self.guard = Guard()
        self.cache = Cache(plan.num_blocks, layout, plan.num_ranks, self.guard)
        self.runner = Runner(self.cache, world.random, world.plan.step_s, world.poisons)
        self.blocks = BlockManager(plan.num_blocks, layout.block_size)
        self.published: dict[object, tuple[int, ...]] = {}
        self._busy_until_s = 0.0
        self._wake_s = 0.0
        self._is_scheduled = False
        self._is_leaving = False
        self._is_unchecked = False
        self._kept: set[SequenceKey] | None = None
        self._waiting: dict[SequenceKey, tuple[bool, tuple[float, SequenceKey]]] = {}
        self._ages: dict[SequenceKey, tuple[float, SequenceKey]] = {}
        self._inbox: Any = Inbox(self._wake)
        with owned_by(self, world.network):
            self.links = Links(
                *(peer, f"tcp://{plan.name}:1", None, self._status, self._inbox.put), world.plan.max_outbox
            )
            self._apply_transfer = self._make_transfer()
        self.prompts = PrefillScheduler(
            self.blocks, max_batch_tokens=plan.max_batch_tokens, max_step_s=0, lease_s=world.plan.lease_s
        )
        self.streams = DecodeScheduler(self.blocks, max_num_seqs=MAX_NUM_SEQS)
        # The drivers are typed by role; here one class plays all, so what a service takes is unknown to types.
        self.service: Any = self._make_service()
        self._loop = self._make_loop()

    def _make_service(self) -> Any:
        sizes = self.plan.num_blocks, VOCAB_SIZE, MAX_MODEL_LEN
        identity = WorkerIdentity(self.name, self.links.address, self.cache.layout, *sizes)
        decode = DecodeService(identity, self.blocks, self.streams)
        match self.role:
            case Role.PREFILL:
                return PrefillService(identity, self._source, self.blocks, self.prompts)
            case Role.DECODE:
                return decode
            case Role.BOTH:
                prefill = PrefillService(identity, None, self.blocks, self.prompts)
                return AggregatedService(prefill, decode, max_num_seqs=MAX_NUM_SEQS)

    def _make_transfer(self) -> Callable[[Any], None]:
        self._source = None
        match self.role:
            case Role.PREFILL:
                apply, self._source = make_sender(self, self._inbox.put)
                return apply
            case Role.DECODE:
                return make_receiver(self, self._pull_finished, self.world.plan.pull_timeout_s)
            case Role.BOTH:
                return lambda effect: None

    def _make_loop(self) -> WorkerLoop[Any, Any]:
        return WorkerLoop(
            self.service,
            self.runner,
            inbox=self._inbox,
            send=self._send,
            apply_transfer=self._transfer,
            extra_counters=dict[str, float],
            is_healthy=lambda: self.links.is_alive,
            watch=GatewayWatch(len(self.world.plan.gateways), lambda num_joined: None, self.clock.now),
            drain_timeout_s=self.world.plan.drain_timeout_s,
            step_expected_s=1.0,
            clock=lambda: self.clock.now,
        )

    def start(self) -> None:
        self.links.start()
        for gateway in self.world.plan.gateways:
            self.links.connect(f"tcp://{gateway}:1")
        self._wake()

    def counters(self) -> dict[str, float]:
        return self.service.status(self.clock.now).counters

    def leave(self) -> None:
        """It is told to stop, and ends once it has nothing left to do."""
        if not self._is_leaving:
            self._is_leaving = True
            self.enter(lambda: self._inbox.put(Stop()))

    def _status(self, gateway: PeerId | None) -> WorkerStatus:
        self._check_queues()
        return self._loop.current_status()

    def _check_queues(self) -> None:
        """What waits for gateways that do not read is bounded by links, and by what they have asked for."""
        for peer in self.links._receiver.peers.values():
            assert len(peer.outbox) <= self.world.plan.max_outbox + 1, f"{self.peer} has {len(peer.outbox)} messages"
        halves = (self.service._prefill, self.service._decode) if self.role is Role.BOTH else (self.service,)
        for half in halves:
            for messages in half._gateways._unsent.values():
                kinds = [(type(message), message.request_id, message.attempt) for message in messages]
                assert len(kinds) == len(set(kinds)), f"{self.peer} is to say again what it has not said yet: {kinds}"

    def _send(self, peer: PeerId, message: Control) -> bool:
        if isinstance(message, Ended) and message.reason is EndReason.PREEMPTED:
            self._check_preempted(SequenceKey(message.request_id, message.attempt))
        return self.links.send(peer, message)

    def _check_preempted(self, key: SequenceKey) -> None:
        if age := self._ages.get(key):
            is_oldest = all(age < other.age_order for other in self.streams._running.values())
            assert not is_oldest, f"{self.peer}: {key} is the oldest, and preempted"

    def _pull_finished(self, event: PullFinished) -> None:
        self.guard.finish(event)
        self._inbox.put(event)

    def _transfer(self, effect: Any) -> None:
        self.world.trace("%s: %s", self.peer, Brief(effect))
        match effect:
            case Publish(key, block_ids):
                self.published[key] = block_ids
            case Withdraw(key):
                self.published.pop(key, None)
            case StartPull():
                self.guard.start(effect)
            case AbortPull() | SendRelease() | KVReleased():
                pass
        self._apply_transfer(effect)

    def _wake(self) -> None:
        """The main thread has something to do, once it does not compute."""
        if not self._is_scheduled and self.clock.now >= self._busy_until_s:
            self._is_scheduled = True
            self.soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        if self.clock.now < self._busy_until_s:
            return
        self._is_unchecked = True
        try:
            if self._loop.may_leave():
                self.links.close(flush_s=0.5)
                self.world.end(self)
                return
            is_busy = self._loop.turn(wait=False)
        except Died:
            self.world.killed(self)
            return
        except GroupFailed:
            self._busy_until_s = self.clock.now + self.runner.hangs_s
            self.after(self.runner.hangs_s, lambda: self.world.killed(self))
            return
        if is_busy:
            self._busy_until_s = self.clock.now + self.runner.busy_s
            self.after(self.runner.busy_s, self._wake)
        else:
            self._wake_at(self._loop.due_s(self.clock.now))

    def _wake_at(self, due_s: float) -> None:
        if due_s > self._wake_s:
            self._wake_s = due_s
            self.at(due_s, self._wake)

    def check(self) -> None:
        """Every block is owned by those who say so, and by nobody else. Who was told to stop takes nothing new."""
        if not self._is_unchecked:
            return
        self._is_unchecked = False
        streams = self.streams.sequences()
        sequences = (*self.prompts.sequences(), *streams)
        references = num_references([sequence.block_table for sequence in sequences], self.blocks.num_blocks)
        assert references == self.blocks._refs, f"{self.peer}: {references} are held, {self.blocks._refs} are counted"
        for key, block_ids in self.published.items():
            assert all(references[block_id] for block_id in block_ids), f"{self.peer}: {key} is published and not held"
        self._ages = {sequence.key: sequence.age_order for sequence in streams if sequence.key in self.streams._running}
        self._check_queue({sequence.key for sequence in streams})
        if self._loop._leave_by_s is not None:
            held = {sequence.key for sequence in sequences}
            assert self._kept is None or held <= self._kept, f"{self.peer} drains, and has taken {held - self._kept}"
            self._kept = held

    def _check_queue(self, held: set[SequenceKey]) -> None:
        """In the queue for blocks nobody who waited longer, or is resumed, was overtaken. Short prompts may do so."""
        before = self._waiting
        self._waiting = {s.key: (s.key.attempt == 0, s.age_order) for s in self.streams.waiting()}
        started = [order for key, order in before.items() if key in held and key not in self._waiting]
        stayed = [order for key, order in before.items() if key in self._waiting]
        assert not (started and stayed) or max(started) < min(stayed), f"{self.peer}: {started} overtake {stayed}"

    def unrest(self) -> str:
        """What is left here when nothing should be; "" for nothing."""
        if self.blocks.num_owned:
            return f"{self.peer} still owns {self.blocks.num_owned} blocks"
        if not self.service.is_drained:
            return f"{self.peer} still has something to do or to say"
        if self.published or self.guard.pulls:
            return f"{self.peer} still has transfers: {[*self.published, *self.guard.pulls]}"
        return ""
