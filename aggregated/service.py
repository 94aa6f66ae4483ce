"""What an aggregated worker decides: its prefill half and its decode half, over one block manager. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from common.engine.step import StepPlan, StepResult
from common.engine.worker import StepCounters, ended
from common.ids import SequenceKey
from common.service import LinkEvent, LinkFull, Received, Send, Tick
from common.wire import Cancel, DecodeRequest, EndReason, PrefillDone, PrefillRequest, Role, Tokens, WorkerStatus
from decode.scheduler import DecodeSequence
from decode.service import DecodeService
from kvtransfer.transport import TransferEffect
from prefill.scheduler import Tenants
from prefill.service import PrefillService

NOTHING = StepPlan(())


class AggregatedService:
    """One aggregated worker group. A sequence is in one of the halves, never in both.

    Both halves hear everything; decode first, so that its tokens can wait for what prefill has to say before them.

    prefill, decode: over the same block manager; prefill without a source, since no KV leaves this cache
    max_num_seqs:    of one step, prompts included
    Mutable state: the halves, what the step under way computes for each, and counters of whole steps.
    """

    def __init__(self, prefill: PrefillService, decode: DecodeService, *, max_num_seqs: int) -> None:
        self._prefill = prefill
        self._decode = decode
        self._max_num_seqs = max_num_seqs
        self._counters = StepCounters()
        self._decode_part = self._prefill_part = NOTHING

    def handle(self, event: LinkEvent | Tick, now: float) -> list[Send]:
        match event:
            case Received(_, PrefillRequest() as request):
                return self._accept(event, request, now)
            case Received(peer, DecodeRequest() as request):
                key = SequenceKey(request.request_id, request.attempt)
                refusal = ended(peer, key, EndReason.TRANSFER, "this worker takes no KV of others")
                return [*_sends(self._prefill.handle(event, now)), refusal]
            case LinkFull(_, Tokens()):
                return _sends(self._decode.handle(event, now))
            case LinkFull():
                return _sends(self._prefill.handle(event, now))
            case _:
                told = self._in_order(self._decode.handle(event, now), now)
                return [*told, *_sends(self._prefill.handle(event, now))]

    def _accept(self, event: Received, request: PrefillRequest, now: float) -> list[Send]:
        """Not again what is decoded already, and in place of earlier attempts."""
        self._decode.handle(event, now)  # which only learns that the gateway lives
        if self._decode.holds(SequenceKey(request.request_id, request.attempt)):
            return []
        if request.attempt:
            superseded = Cancel(request_id=request.request_id, attempt=request.attempt - 1)
            self._decode.handle(Received(event.peer, superseded), now)
        return _sends(self._prefill.handle(event, now))

    def _in_order(self, effects: Sequence[Send | TransferEffect], now: float) -> list[Send]:
        """Holds tokens back while a gateway's link has not taken the prefill half's messages: one may be token 0."""
        in_order: list[Send] = []
        for send in _sends(effects):
            if isinstance(send.message, Tokens) and self._prefill.has_unsent_for(send.peer):
                self._decode.handle(LinkFull(send.peer, send.message), now)
            else:
                in_order.append(send)
        return in_order

    def plan(self, now: float) -> tuple[StepPlan | None, list[Send]]:
        """Running sequences take the blocks that they need before prompts do."""
        decode_part, preempted = self._decode.plan(now)
        # A preempted sequence comes back as the first in the queue: no other prompt takes its blocks before that.
        max_num_seqs = 0 if preempted else self._max_num_seqs
        prefill_part, _ = self._prefill.plan(now, Tenants(self._decode.num_running, max_num_seqs))
        self._decode_part, self._prefill_part = decode_part or NOTHING, prefill_part or NOTHING
        sequences = self._decode_part.sequences + self._prefill_part.sequences
        return (StepPlan(sequences) if sequences else None), _sends(preempted)

    def complete(self, plan: StepPlan, result: StepResult, now: float) -> list[Send]:
        self._counters.count(plan, result)
        told: list[Send] = []
        if self._decode_part.sequences:
            told += self._in_order(self._decode.complete(self._decode_part, result, now), now)
        if self._prefill_part.sequences:
            told += _sends(self._prefill.complete(self._prefill_part, result, now))
        for send in told:
            if isinstance(send.message, PrefillDone) and send.message.finish_reason is None:
                self._go_on(send.message)
        return told

    def _go_on(self, done: PrefillDone) -> None:
        """The prompt becomes a running sequence, in the blocks that it has."""
        computed = self._prefill.take(SequenceKey(done.request_id, done.attempt))
        self._decode.adopt(
            DecodeSequence(
                key=computed.key,
                gateway=computed.gateway,
                prompt_token_ids=computed.prompt_token_ids,
                output_token_ids=[*computed.output_token_ids, done.token_id],
                sampling=computed.sampling,
                arrival_s=computed.arrival_s,
                num_computed=computed.num_computed,
                block_table=computed.block_table,
            )
        )

    def drain(self) -> list[Send]:
        return _sends([*self._decode.drain(), *self._prefill.drain()])

    def abandon(self) -> list[Send]:
        return _sends([*self._decode.abandon(), *self._prefill.abandon()])

    @property
    def is_drained(self) -> bool:
        return self._prefill.is_drained and self._decode.is_drained

    def status(self, now: float) -> WorkerStatus:
        prefill, decode = self._prefill.status(now), self._decode.status(now)
        return replace(
            prefill,
            role=Role.BOTH,
            num_running=prefill.num_running + decode.num_running,
            counters={**prefill.counters, **decode.counters, **self._counters.totals},
        )


def _sends(effects: Sequence[Send | TransferEffect]) -> list[Send]:
    """Without what the halves say to a KV transfer: nothing is ever published here, and nothing pulled."""
    return [effect for effect in effects if isinstance(effect, Send)]
