"""What the services of workers have in common. Pure: no torch, no sockets, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar

from common.engine.step import StepPlan, StepResult
from common.ids import PeerId, SequenceKey
from common.kv_layout import KVLayout
from common.peers import LivePeers, Tombstones
from common.service import LinkEvent, Send, Tick
from common.wire import Control, DecodeRequest, Ended, EndReason, PrefillRequest, WorkerStatus

GATEWAY_TIMEOUT_S = 5.0
"""A gateway that is silent for this long is gone, and so is what it asked for."""

EventT = TypeVar("EventT", contravariant=True)
EffectT = TypeVar("EffectT", covariant=True)


class WorkerService(Protocol[EventT, EffectT]):
    """A sans-I/O worker. The driver hands it events, runs its plans, and carries out the effects, in order.

    EventT, EffectT: what it hears from and asks of its side of the KV transfer.
    """

    def handle(self, event: LinkEvent | Tick | EventT, now: float) -> Sequence[Send | EffectT]: ...

    def plan(self, now: float) -> tuple[StepPlan | None, Sequence[Send | EffectT]]:
        """The next step, None when there is nothing to compute; with effects to carry out before it."""
        ...

    def complete(self, plan: StepPlan, result: StepResult, now: float) -> Sequence[Send | EffectT]: ...

    def drain(self) -> Sequence[Send | EffectT]:
        """Take nothing new from now on; give up what has not begun."""
        ...

    def abandon(self) -> Sequence[Send | EffectT]:
        """The drain took too long: give up what is left."""
        ...

    @property
    def is_drained(self) -> bool: ...

    def status(self, now: float) -> WorkerStatus:
        """Without what the driver knows of steps."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What stays the same about a worker for its whole life.

    max_model_len: tokens of the longest sequence that its model takes
    """

    name: str
    address: str
    layout: KVLayout
    num_blocks: int
    vocab_size: int
    max_model_len: int

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence that it can ever hold."""
        return min(self.max_model_len, self.num_blocks * self.layout.block_size)

    def refuse(self, request: PrefillRequest | DecodeRequest, num_tokens: int) -> tuple[EndReason, str] | None:
        """Why a sequence that becomes so long can never be computed here; None when it can.

        A step computes all its sequences or none, so one that would break it must not get into it.
        """
        if not 0 < num_tokens <= self.max_context:
            return EndReason.TOO_LARGE, f"this worker holds 1 to {self.max_context} tokens, got {num_tokens}"
        sampling = request.sampling
        largest = max(
            chain(
                *(request.prompt_token_ids, request.output_token_ids, sampling.eos_token_ids, sampling.stop_token_ids),
                (token_id for token_id, _ in sampling.logit_bias),
            ),
            default=0,
        )
        if largest >= self.vocab_size:
            return EndReason.REFUSED, f"the model has {self.vocab_size} tokens, got token id {largest}"
        return None


def num_tokens_at_end(request: PrefillRequest | DecodeRequest) -> int:
    """Of the whole sequence when it ends by its length."""
    return len(request.prompt_token_ids) + max(request.sampling.max_tokens, len(request.output_token_ids) + 1)


class Gateways:
    """What a worker remembers of its gateways.

    Mutable state: who was heard of, whose requests were cancelled, and what could not be sent yet.
    """

    def __init__(self) -> None:
        self._live = LivePeers(GATEWAY_TIMEOUT_S)
        self._cancelled = Tombstones()
        self._unsent: dict[PeerId, list[Control]] = {}

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def heard(self, peer: PeerId, now: float) -> None:
        self._live.heard(peer, now)

    def is_live(self, peer: PeerId) -> bool:
        return peer in self._live

    def cancelled(self, key: SequenceKey) -> None:
        self._cancelled.add(key)

    def is_cancelled(self, key: SequenceKey) -> bool:
        return key in self._cancelled

    def has_unsent_for(self, peer: PeerId) -> bool:
        return peer in self._unsent

    def keep_unsent(self, peer: PeerId, message: Control) -> None:
        """Its link is full. Kept until it is sent or the gateway is gone, so there are at most a few a request."""
        if peer in self._live:
            self._unsent.setdefault(peer, []).append(message)

    def resend(self) -> list[Send]:
        unsent, self._unsent = self._unsent, {}
        return [Send(peer, message) for peer, messages in unsent.items() for message in messages]

    def lost(self, peer: PeerId) -> None:
        self._live.forget(peer)
        self._unsent.pop(peer, None)

    def pop_silent(self, now: float) -> list[PeerId]:
        silent = self._live.pop_silent(now)
        for peer in silent:
            self.lost(peer)
        return silent


def ended(gateway: PeerId, key: SequenceKey, reason: EndReason, detail: str) -> Send:
    """Tell a gateway that the worker holds nothing of this attempt any more."""
    return Send(gateway, Ended(request_id=key.request_id, attempt=key.attempt, reason=reason, detail=detail))


class StepCounters:
    """Totals of what steps computed, told apart by what the tokens were. Proves which pool did what.

    prompt_tokens_computed, output_tokens_computed: whose KV was computed here
    first_tokens_sampled, later_tokens_sampled:     by index in the request's output
    """

    def __init__(self) -> None:
        self.totals = {
            "steps": 0.0,
            "step_seconds": 0.0,
            "prompt_tokens_computed": 0.0,
            "output_tokens_computed": 0.0,
            "first_tokens_sampled": 0.0,
            "later_tokens_sampled": 0.0,
            "sequences_failed": 0.0,
        }

    def count(self, plan: StepPlan, result: StepResult) -> None:
        totals = self.totals
        totals["steps"] += 1
        totals["step_seconds"] += result.duration_s
        totals["sequences_failed"] += len(result.failed)
        for sequence in plan.sequences:
            num_prompt = len(sequence.prompt_token_ids)
            from_prompt = max(0, min(sequence.start + len(sequence.token_ids), num_prompt) - sequence.start)
            totals["prompt_tokens_computed"] += from_prompt
            totals["output_tokens_computed"] += len(sequence.token_ids) - from_prompt
            if sequence.key in result.sampled:
                name = "later_tokens_sampled" if sequence.output_token_ids else "first_tokens_sampled"
                totals[name] += 1
