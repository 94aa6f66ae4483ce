"""What the prefill service decides: messages and steps in, messages and transfer effects out. Pure."""

from common.engine.block_manager import BlockManager
from common.engine.step import StepPlan, StepResult
from common.engine.worker import Gateways, StepCounters, WorkerIdentity, ended, num_tokens_at_end
from common.ids import PeerId, SequenceKey
from common.kv_source import KVDescriptor, KVSource
from common.service import LinkEvent, LinkFull, LinkLost, Received, Send, Tick
from common.wire import (
    Cancel,
    EndReason,
    GatewayStatus,
    PrefillDone,
    PrefillRequest,
    Role,
    WorkerStatus,
)
from kvtransfer.transport import KVReleased, Publish, SenderEffect, Withdraw
from prefill.scheduler import PrefillEvent, PrefillFailed, PrefillScheduler, PrefillSequence, Tenants

Event = LinkEvent | Tick | KVReleased
Effect = Send | SenderEffect


class PrefillService:
    """One prefill worker group.

    source: where its KV can be fetched; None: sequences go on in this cache, and whoever drives the service takes
            (`take`) what was computed
    Mutable state: the scheduler's sequences, what is remembered of gateways, and counters.
    """

    def __init__(
        self, identity: WorkerIdentity, source: KVSource | None, blocks: BlockManager, scheduler: PrefillScheduler
    ) -> None:
        self._identity = identity
        self._source = source
        self._blocks = blocks
        self._scheduler = scheduler
        self._gateways = Gateways()
        self._counters = StepCounters()
        self._cached_tokens = 0
        self._leases_expired = 0
        self._is_draining = False

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(peer, message):
                self._gateways.heard(peer, now)
                return self._receive(peer, message, now)
            case LinkLost(peer, reason):
                return self._lose(peer, reason)
            case LinkFull(peer, message):
                self._gateways.keep_unsent(peer, message)
                return []
            case KVReleased(key):
                self._scheduler.release(key)
                return [Withdraw(key)]
            case Tick():
                return self._tick(now)

    def _receive(self, peer: PeerId, message: object, now: float) -> list[Effect]:
        match message:
            case PrefillRequest():
                return self._accept(peer, message, now)
            case Cancel(request_id=request_id, attempt=attempt):
                return self._cancel(SequenceKey(request_id, attempt))
            case GatewayStatus(leases=leases):
                for request_id, attempt in leases:
                    self._scheduler.renew(SequenceKey(request_id, attempt), now)
                return []
            case _:
                return []

    def _accept(self, peer: PeerId, request: PrefillRequest, now: float) -> list[Effect]:
        key = SequenceKey(request.request_id, request.attempt)
        if self._gateways.is_cancelled(key) or self._scheduler.get(key):
            return []
        if self._is_draining:
            return [ended(peer, key, EndReason.DRAINING, "this worker is draining")]
        num_held = len(request.prompt_token_ids) + len(request.output_token_ids)
        num_tokens = num_held if self._source else num_tokens_at_end(request)
        if refusal := self._identity.refuse(request, num_tokens):
            return [ended(peer, key, *refusal)]
        superseded = self._cancel(SequenceKey(key.request_id, key.attempt - 1)) if key.attempt else []
        self._scheduler.add(request, peer, now)
        return superseded

    def _cancel(self, key: SequenceKey) -> list[Effect]:
        """Drop this attempt and all earlier ones."""
        self._gateways.cancelled(key)
        sequences = [
            sequence
            for sequence in self._scheduler.sequences()
            if sequence.key.request_id == key.request_id and sequence.key.attempt <= key.attempt
        ]
        return [self._drop(sequence) for sequence in sequences]

    def _drop(self, sequence: PrefillSequence) -> Withdraw:
        self._scheduler.cancel(sequence.key)
        return Withdraw(sequence.key)

    def _lose(self, peer: PeerId, reason: str) -> list[Effect]:
        """Give up all that a gateway asked for, and tell it, in case that it is still there."""
        self._gateways.lost(peer)
        effects: list[Effect] = []
        for sequence in self._scheduler.sequences():
            if sequence.gateway == peer:
                effects += [self._drop(sequence), ended(peer, sequence.key, EndReason.LINK_LOST, reason)]
        return effects

    def _tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = [*self._gateways.resend()]
        for peer in self._gateways.pop_silent(now):
            effects += self._lose(peer, "the gateway was silent for too long")
        for sequence in self._scheduler.pop_expired(now):
            self._leases_expired += 1
            detail = "the handoff was neither fetched nor renewed"
            effects += [
                Withdraw(sequence.key),
                ended(sequence.gateway, sequence.key, EndReason.LEASE_EXPIRED, detail),
            ]
        return effects

    def take(self, key: SequenceKey) -> PrefillSequence:
        """A prompt that was just reported, with its blocks. See `PrefillScheduler.take`."""
        return self._scheduler.take(key)

    def has_unsent_for(self, peer: PeerId) -> bool:
        return self._gateways.has_unsent_for(peer)

    def plan(self, now: float, tenants: Tenants | None = None) -> tuple[StepPlan | None, list[Effect]]:
        return self._scheduler.schedule(now, tenants), []

    def complete(self, plan: StepPlan, result: StepResult, now: float) -> list[Effect]:
        self._counters.count(plan, result)
        effects: list[Effect] = []
        for event in self._scheduler.update(plan, result, now):
            effects += self._report(event)
        return effects

    def _report(self, event: PrefillEvent) -> list[Effect]:
        sequence = event.sequence
        if isinstance(event, PrefillFailed):
            return [ended(sequence.gateway, sequence.key, EndReason.FAILED, event.reason)]
        self._cached_tokens += sequence.num_cached
        finish = event.finish
        kv = self._describe(sequence, self._source) if self._source and not finish else None
        done = PrefillDone(
            request_id=sequence.key.request_id,
            attempt=sequence.key.attempt,
            index=len(sequence.output_token_ids),
            token_id=event.token_id,
            num_cached_tokens=sequence.num_cached,
            finish_reason=finish.reason if finish else None,
            stop_token_id=finish.stop_token_id if finish else None,
            kv=kv,
        )
        publish = [Publish(sequence.key, tuple(sequence.block_table))] if kv else []
        return [*publish, Send(sequence.gateway, done)]

    def _describe(self, sequence: PrefillSequence, source: KVSource) -> KVDescriptor:
        return KVDescriptor(
            source=source,
            num_tokens=len(sequence.token_ids),
            block_ids=tuple(sequence.block_table),
            checksums=tuple(sequence.checksums),
        )

    def drain(self) -> list[Effect]:
        """Prompts that have not started go elsewhere; what runs or waits to be fetched is finished."""
        self._is_draining = True
        effects: list[Effect] = []
        for sequence in self._scheduler.waiting():
            self._drop(sequence)
            effects.append(ended(sequence.gateway, sequence.key, EndReason.DRAINING, "this worker is draining"))
        return effects

    def abandon(self) -> list[Effect]:
        """The drain took too long: what is left goes elsewhere, too."""
        effects: list[Effect] = []
        for sequence in self._scheduler.sequences():
            detail = "this worker is leaving"
            effects += [self._drop(sequence), ended(sequence.gateway, sequence.key, EndReason.DRAINING, detail)]
        return effects

    @property
    def is_drained(self) -> bool:
        return not (self._scheduler.sequences() or self._gateways.has_unsent)

    def status(self, now: float) -> WorkerStatus:
        return WorkerStatus(
            name=self._identity.name,
            address=self._identity.address,
            role=Role.PREFILL,
            layout=self._identity.layout,
            num_blocks=self._identity.num_blocks,
            num_free_blocks=self._blocks.num_available,
            max_context=self._identity.max_context,
            num_waiting=self._scheduler.num_waiting,
            num_waiting_tokens=self._scheduler.num_unfinished_tokens,
            num_running=self._scheduler.num_running + self._scheduler.num_handoffs,
            is_draining=self._is_draining,
            step_running_s=0.0,
            step_expected_s=0.0,
            counters={
                **self._counters.totals,
                "cached_tokens": float(self._cached_tokens),
                "leases_expired": float(self._leases_expired),
                "handoffs": float(self._scheduler.num_handoffs),
                "owned_blocks": float(self._blocks.num_owned),
                "protected_blocks": float(self._blocks.num_protected),
            },
        )
