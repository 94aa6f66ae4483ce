"""What the decode service decides: messages and steps in, messages and transfer effects out. Pure."""

from common.engine.block_manager import BlockManager
from common.engine.step import StepPlan, StepResult
from common.engine.worker import Gateways, StepCounters, WorkerIdentity, ended, num_tokens_at_end
from common.ids import PeerId, SequenceKey
from common.service import LinkEvent, LinkFull, LinkLost, Received, Send, Tick
from common.wire import (
    Cancel,
    Control,
    DecodeRequest,
    EndReason,
    Role,
    Tokens,
    WorkerStatus,
)
from decode.outbox import TokenOutbox
from decode.scheduler import DecodeFailed, DecodeScheduler, DecodeSequence
from kvtransfer.transport import AbortPull, PullFinished, ReceiverEffect, SendRelease, StartPull

Event = LinkEvent | Tick | PullFinished
Effect = Send | ReceiverEffect


class DecodeService:
    """One decode worker group.

    Mutable state: the scheduler's sequences, tokens that are not on their way yet, what is remembered of
    gateways, and counters.
    """

    def __init__(self, identity: WorkerIdentity, blocks: BlockManager, scheduler: DecodeScheduler) -> None:
        self._identity = identity
        self._blocks = blocks
        self._scheduler = scheduler
        self._gateways = Gateways()
        self._outbox = TokenOutbox()
        self._counters = StepCounters()
        self._preemptions = 0
        self._is_draining = False

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(peer, message):
                self._gateways.heard(peer, now)
                return self._receive(peer, message, now)
            case LinkLost(peer, reason):
                return self._lose(peer, reason)
            case LinkFull(peer, message):
                self._keep(peer, message)
                return []
            case PullFinished():
                return self._pulled(event)
            case Tick():
                return self._tick(now)

    def _receive(self, peer: PeerId, message: object, now: float) -> list[Effect]:
        match message:
            case DecodeRequest():
                return self._accept(peer, message, now)
            case Cancel(request_id=request_id, attempt=attempt):
                return self._cancel(SequenceKey(request_id, attempt))
            case _:
                return []

    def _accept(self, peer: PeerId, request: DecodeRequest, now: float) -> list[Effect]:
        key = SequenceKey(request.request_id, request.attempt)
        if self._gateways.is_cancelled(key) or self._scheduler.get(key):
            return []
        if self._is_draining:
            return [ended(peer, key, EndReason.DRAINING, "this worker is draining")]
        if refusal := self._refuse(request):
            return [ended(peer, key, *refusal)]
        superseded = self._cancel(SequenceKey(key.request_id, key.attempt - 1)) if key.attempt else []
        self._outbox.forget(key)  # asked again after its end: tokens that are still unsent will come anew
        self._scheduler.add(request, peer, now)
        return superseded

    def _refuse(self, request: DecodeRequest) -> tuple[EndReason, str] | None:
        kv = request.kv
        if refusal := self._identity.refuse(request, num_tokens_at_end(request)):
            return refusal
        if mismatches := self._identity.layout.mismatches(kv.source.layout):
            return EndReason.TRANSFER, f"KV layouts differ, ours != theirs: {', '.join(mismatches)}"
        wanted = len(request.prompt_token_ids) + len(request.output_token_ids) - 1
        num_blocks = self._blocks.num_blocks_for(wanted)
        got = (kv.num_tokens, len(kv.block_ids), len(kv.checksums))
        if not request.output_token_ids or got != (wanted, num_blocks, num_blocks):
            detail = f"KV of {wanted} tokens in {num_blocks} blocks is wanted, got tokens, blocks, checksums = {got}"
            return EndReason.TRANSFER, detail
        num_heads = self._identity.layout.num_kv_heads
        if other := {len(checksums) for checksums in kv.checksums} - {num_heads}:
            return EndReason.TRANSFER, f"checksums of {num_heads} heads a block are wanted, got {min(other)}"
        return None

    def adopt(self, sequence: DecodeSequence) -> None:
        """Go on with a prompt that was computed in the same cache, also while draining. See `DecodeScheduler.adopt`."""
        self._scheduler.adopt(sequence)

    def holds(self, key: SequenceKey) -> bool:
        return self._scheduler.get(key) is not None

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    def _cancel(self, key: SequenceKey) -> list[Effect]:
        """Drop this attempt and all earlier ones."""
        self._gateways.cancelled(key)
        self._outbox.forget(key)
        effects: list[Effect] = []
        for sequence in self._scheduler.sequences():
            if sequence.key.request_id == key.request_id and sequence.key.attempt <= key.attempt:
                effects += self._drop(sequence)
        return effects

    def _drop(self, sequence: DecodeSequence) -> list[Effect]:
        return [AbortPull(sequence.key)] if self._scheduler.cancel(sequence.key) else []

    def _give_up(self, sequence: DecodeSequence, reason: EndReason, detail: str) -> list[Effect]:
        return [*self._drop(sequence), ended(sequence.gateway, sequence.key, reason, detail)]

    def _lose(self, peer: PeerId, reason: str) -> list[Effect]:
        """Give up all that a gateway asked for, and tell it, in case that it is still there."""
        self._gateways.lost(peer)
        self._outbox.lost(peer)
        effects: list[Effect] = []
        for sequence in self._scheduler.sequences():
            if sequence.gateway == peer and not sequence.is_cancelled:
                effects += self._give_up(sequence, EndReason.LINK_LOST, reason)
        return effects

    def _keep(self, peer: PeerId, message: Control) -> None:
        """Its link is full: tokens wait in the outbox, where later ones join them."""
        if isinstance(message, Tokens):
            if self._gateways.is_live(peer):
                self._outbox.put_back(peer, message.entries)
        else:
            self._gateways.keep_unsent(peer, message)

    def _pulled(self, event: PullFinished) -> list[Effect]:
        sequence = self._scheduler.pulled(event.key, is_complete=not event.error)
        if sequence is None:
            return []
        if event.error:
            return [ended(sequence.gateway, sequence.key, EndReason.TRANSFER, event.error)]
        return [SendRelease(sequence.key, sequence.pulled_kv.source)]

    def _tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = [*self._gateways.resend(), *self._outbox.flush()]
        for peer in self._gateways.pop_silent(now):
            effects += self._lose(peer, "the gateway was silent for too long")
        return effects

    def plan(self, now: float) -> tuple[StepPlan | None, list[Effect]]:
        effects: list[Effect] = []
        for sequence in self._scheduler.admit():
            effects += self._start_pull(sequence)
        plan, preempted = self._scheduler.schedule()
        self._preemptions += len(preempted)
        for sequence in preempted:
            detail = "this worker has no KV blocks left"
            effects.append(ended(sequence.gateway, sequence.key, EndReason.PREEMPTED, detail))
        return plan, effects

    def _start_pull(self, sequence: DecodeSequence) -> list[Effect]:
        copies = self._scheduler.copies(sequence)
        if copies:
            return [StartPull(sequence.key, sequence.pulled_kv, copies)]
        return self._pulled(PullFinished(sequence.key, error="", num_bytes=0))

    def complete(self, plan: StepPlan, result: StepResult, now: float) -> list[Effect]:
        self._counters.count(plan, result)
        effects: list[Effect] = []
        for event in self._scheduler.update(plan, result):
            if isinstance(event, DecodeFailed):
                effects.append(ended(event.sequence.gateway, event.sequence.key, EndReason.FAILED, event.reason))
            else:
                self._outbox.add(event.sequence.gateway, event)
        return [*self._outbox.flush(), *effects]

    def drain(self) -> list[Effect]:
        """What does not run yet goes elsewhere; running sequences go on."""
        self._is_draining = True
        effects: list[Effect] = []
        for sequence in self._scheduler.waiting():
            effects += self._give_up(sequence, EndReason.DRAINING, "this worker is draining")
        return effects

    def abandon(self) -> list[Effect]:
        """The drain took too long: what is left goes elsewhere, too."""
        effects: list[Effect] = []
        for sequence in self._scheduler.sequences():
            if not sequence.is_cancelled:
                effects += self._give_up(sequence, EndReason.DRAINING, "this worker is leaving")
        return effects

    @property
    def is_drained(self) -> bool:
        return not (self._scheduler.sequences() or self._gateways.has_unsent or self._outbox)

    def status(self, now: float) -> WorkerStatus:
        return WorkerStatus(
            name=self._identity.name,
            address=self._identity.address,
            role=Role.DECODE,
            layout=self._identity.layout,
            num_blocks=self._identity.num_blocks,
            num_free_blocks=self._blocks.num_available,
            max_context=self._identity.max_context,
            num_waiting=self._scheduler.num_waiting,
            num_waiting_tokens=self._scheduler.num_waiting_tokens,
            num_running=self._scheduler.num_running + self._scheduler.num_pulling,
            is_draining=self._is_draining,
            step_running_s=0.0,
            step_expected_s=0.0,
            counters={
                **self._counters.totals,
                "preemptions": float(self._preemptions),
                "pulling": float(self._scheduler.num_pulling),
                "owned_blocks": float(self._blocks.num_owned),
            },
        )
