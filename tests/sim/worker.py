"""A worker of the simulated ring: a real service, a fake runner, and its side of the KV transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aggregated.service import AggregatedService
from common.engine.block_manager import BlockManager
from common.engine.step import StepPlan
from common.engine.worker import WorkerIdentity
from common.ids import PeerId, SequenceKey
from common.kv_layout import head_checksums
from common.service import TICK_S, LinkEvent, LinkFull, Send, Tick
from common.wire import Role
from decode.scheduler import DecodeScheduler
from decode.service import DecodeService
from kvtransfer.transport import AbortPull, KVReleased, Publish, PullFinished, SendRelease, StartPull, Withdraw
from prefill.scheduler import PrefillScheduler
from prefill.service import PrefillService
from tests.fakes import MAX_MODEL_LEN, VOCAB_SIZE, FakeRunner, fake_layout, fake_source
from tests.sim.network import MAX_DELAY_S

if TYPE_CHECKING:
    from tests.sim.ring import World

STATUS_S = 0.5
STEP_S = 0.01
LEASE_S = 5.0
MAX_NUM_SEQS = 16
GATEWAY = PeerId("gateway#0")


class Worker:
    """One incarnation.

    Mutable state: whether a step is under way; published handoffs (prefill) or pulls to abort (decode).
    """

    def __init__(self, world: World, role: Role, peer: PeerId, num_blocks: int, max_batch_tokens: int) -> None:
        self.world, self.role, self.peer, self.max_batch_tokens = world, role, peer, max_batch_tokens
        layout = fake_layout()
        self.runner = FakeRunner(num_blocks, layout)
        self.blocks = BlockManager(num_blocks, layout.block_size)
        self.name = peer.split("#")[0]
        identity = WorkerIdentity(self.name, f"tcp://{peer}:1", layout, num_blocks, VOCAB_SIZE, MAX_MODEL_LEN)
        source = fake_source(peer, layout, num_blocks)
        prompts = PrefillScheduler(self.blocks, max_batch_tokens=max_batch_tokens, max_step_s=0, lease_s=LEASE_S)
        decode = DecodeService(identity, self.blocks, DecodeScheduler(self.blocks, max_num_seqs=MAX_NUM_SEQS))
        # The drivers are typed by role; here one class plays all, so what a service takes is unknown to types.
        self.service: Any
        match role:
            case Role.PREFILL:
                self.service = PrefillService(identity, source, self.blocks, prompts)
            case Role.DECODE:
                self.service = decode
            case Role.BOTH:
                prefill = PrefillService(identity, None, self.blocks, prompts)
                self.service = AggregatedService(prefill, decode, max_num_seqs=MAX_NUM_SEQS)
        self.published: dict[SequenceKey, tuple[int, ...]] = {}
        self.aborted: set[SequenceKey] = set()
        self._is_stepping = False

    @property
    def is_alive(self) -> bool:
        return self.world.workers.get(self.peer) is self

    def counters(self) -> dict[str, float]:
        return self.service.status(self.world.now).counters

    def start(self) -> None:
        self._report()
        self._tick()

    def _report(self) -> None:
        if not self.is_alive:
            return
        if not self.world.is_frozen(self.peer):
            self.world.network.send(self.peer, GATEWAY, self.service.status(self.world.now))
        self.world.clock.after(STATUS_S, self._report)

    def _tick(self) -> None:
        if self.is_alive:
            self.world.when_awake(self.peer, lambda: self.hear(Tick()))
            self.world.clock.after(TICK_S, self._tick)

    def hear(self, event: LinkEvent | Tick | PullFinished | KVReleased) -> None:
        if self.is_alive:
            self._do(self.service.handle(event, self.world.now))
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
            self.world.clock.after(STEP_S, lambda: self.world.when_awake(self.peer, lambda: self._complete(plan)))

    def _complete(self, plan: StepPlan) -> None:
        """Execution and completion are one instant, since the real loop hears nothing between them."""
        if self.is_alive:
            self._is_stepping = False
            self._do(self.service.complete(plan, self.runner.execute(plan), self.world.now))
            self._step()

    def _do(self, effects: list[object]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    if not self.world.network.send(self.peer, peer, message):
                        self._do(self.service.handle(LinkFull(peer, message), self.world.now))
                case Publish(key, block_ids):
                    self.published[key] = block_ids
                case Withdraw(key):
                    self.published.pop(key, None)
                case StartPull():
                    self._later(5 * MAX_DELAY_S, lambda pull=effect: self._pull(pull))
                case AbortPull(key):
                    self.aborted.add(key)
                case SendRelease():
                    if not self.world.network.loses():
                        self._later(MAX_DELAY_S, lambda release=effect: self._release(release))
                case _:
                    raise AssertionError(f"unknown effect {effect}")

    def _later(self, at_most_s: float, action: Any) -> None:
        self.world.clock.after(self.world.random.uniform(0, at_most_s), action)

    def _pull(self, pull: StartPull) -> None:
        error = "timed out" if self.world.network.loses() else self._copy(pull)
        finished = PullFinished(pull.key, error, 0 if error else len(pull.copies) * self.runner.layout.block_bytes)
        self.world.when_awake(self.peer, lambda: self.hear(finished))

    def _copy(self, pull: StartPull) -> str:
        """Copy and verify; returns what went wrong, "" for nothing."""
        source = self.world.workers.get(pull.kv.source.peer)
        if pull.key in self.aborted:
            return "aborted"
        if source is None or pull.key not in source.published:
            return "the handoff is not held any more"
        for copy in pull.copies:
            assert copy.source in source.published[pull.key]
            self.runner.block(copy.target)[:] = source.runner.block(copy.source)
            if head_checksums(self.runner.block(copy.target), self.runner.layout.head_bytes) != copy.checksums:
                return "checksum mismatch"
        return ""

    def _release(self, release: SendRelease) -> None:
        if worker := self.world.workers.get(release.source.peer):
            self.world.when_awake(worker.peer, lambda: worker.hear(KVReleased(release.key)))
