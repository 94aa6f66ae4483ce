"""Which prompt tokens the next step computes. Pure: no torch, no sockets, no clock."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.block_hashes import BlockHash, hash_blocks, num_shareable_blocks
from common.engine.block_manager import BlockManager
from common.engine.step import ScheduledSequence, StepPlan, StepResult
from common.ids import BlockId, PeerId, SequenceKey
from common.kv_layout import HeadChecksums
from common.sampling import Finish, SamplingParams, check_finish
from common.wire import PrefillRequest
from prefill.chunks import SHORT_SHARE, assign_chunks
from prefill.patience import hold_until_s, patient_until_s

FIRST_BUDGET_TOKENS = 256
"""Tokens of a step while nothing is known about this machine's speed."""
MIN_BUDGET_TOKENS = 128
"""A step's length is not cut below these. Reading all weights takes as long as computing 11 tokens where a CPU has no
matrix units (8 ms on two cores of an EPYC 9004, 67 ms on one of the first generation): a twelfth of such a step."""
RATE_SMOOTHING = 0.5


@dataclass(slots=True)
class PrefillSequence:
    """One attempt at one request, from arrival to the release of its blocks.

    Mutable state: block_table, num_computed and num_cached once it starts; checksums, parallel to block_table,
    as its blocks are sealed; held_since_s from when it could have ended; lease_until_s as a handoff.
    """

    key: SequenceKey
    gateway: PeerId
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    hashes: list[BlockHash]
    token_ids: tuple[int, ...]
    block_table: list[BlockId] = field(default_factory=list[BlockId])
    checksums: list[HeadChecksums] = field(default_factory=list[HeadChecksums])
    num_computed: int = 0
    num_cached: int = 0
    held_since_s: float | None = None
    lease_until_s: float = 0.0

    @property
    def num_remaining(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def may_be_held(self) -> bool:
        """Whether it goes on in decode, and no client is reading it yet."""
        return self.key.attempt == 0 and self.sampling.max_tokens > 1

    @property
    def age_order(self) -> tuple[bool, float, SequenceKey]:
        """Resumed sequences first, then by first arrival."""
        return (self.key.attempt == 0, self.arrival_s, self.key)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Event: the sequence's next token is out. With finish None its KV now waits as a handoff."""

    sequence: PrefillSequence
    token_id: int
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """Event: the step could not serve this sequence; its blocks are free."""

    sequence: PrefillSequence
    reason: str


PrefillEvent = Prefilled | PrefillFailed


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that may compute in the next step.

    cached:          blocks that a waiting one would share
    num_remaining:   tokens that are still to be computed then
    patient_until_s: see patience.py
    """

    sequence: PrefillSequence
    cached: list[BlockId]
    num_remaining: int
    patient_until_s: float

    @property
    def urgency(self) -> tuple[bool, float, SequenceKey]:
        """Resumed sequences first, then who has waited for as long as it bears soonest."""
        return (self.sequence.key.attempt == 0, self.patient_until_s, self.sequence.key)


@dataclass(frozen=True, slots=True)
class Tenants:
    """Sequences that decode in the same cache and in the same steps, where prompts are computed beside them.

    max_num_seqs: of a step, theirs and prompts
    """

    num_running: int
    max_num_seqs: int

    def admit(self, num_prompts: int, num_blocks_left: int) -> bool:
        """Whether a prompt may start that leaves so many blocks, beside so many that run.

        A block is kept for each sequence and prompt that runs: what it grows into before long. With nobody beside it a
        prompt may take all, so the first in the queue starts once the others have come to their end.
        """
        num_seqs = self.num_running + num_prompts
        return num_seqs < self.max_num_seqs and num_blocks_left >= num_seqs


class PrefillScheduler:
    """The life of sequences on a prefill worker.

    max_step_s: a step's wanted length; 0 leaves only the token budget.
    hold_share: of the time that a prompt has waited too long, how long it may be held back; see patience.py
    lease_s:    after which a handoff that is not renewed is given up, and what is cached of it not protected any more
    Mutable state: three disjoint maps by key (waiting, running, handoffs) and the measured speed.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_tokens: int,
        max_step_s: float,
        hold_share: float = 0.0,
        lease_s: float = math.inf,
    ) -> None:
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_step_s = max_step_s
        self._hold_share = hold_share
        self._lease_s = lease_s
        self._waiting: dict[SequenceKey, PrefillSequence] = {}
        self._running: dict[SequenceKey, PrefillSequence] = {}
        self._handoffs: dict[SequenceKey, PrefillSequence] = {}
        self._tokens_per_s = 0.0

    @property
    def max_context(self) -> int:
        return self._blocks.num_blocks * self._blocks.block_size

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_handoffs(self) -> int:
        return len(self._handoffs)

    @property
    def num_unfinished_tokens(self) -> int:
        """Prompt tokens that are still to be computed; those of a waiting prompt that are cached now are not."""
        num_running = sum(sequence.num_remaining for sequence in self._running.values())
        return num_running + sum(self._num_to_compute(sequence) for sequence in self._waiting.values())

    def _num_to_compute(self, waiting: PrefillSequence) -> int:
        return waiting.num_remaining - len(self._match(waiting)) * self._blocks.block_size

    def waiting(self) -> list[PrefillSequence]:
        return list(self._waiting.values())

    def sequences(self) -> list[PrefillSequence]:
        return [*self._waiting.values(), *self._running.values(), *self._handoffs.values()]

    def get(self, key: SequenceKey) -> PrefillSequence | None:
        return self._waiting.get(key) or self._running.get(key) or self._handoffs.get(key)

    def add(self, request: PrefillRequest, gateway: PeerId, now: float) -> None:
        """Queue a sequence that is new here and fits into the cache (`max_context`)."""
        key = SequenceKey(request.request_id, request.attempt)
        token_ids = request.prompt_token_ids + request.output_token_ids
        assert 0 < len(token_ids) <= self.max_context, f"{len(token_ids)} tokens, the cache holds {self.max_context}"
        assert self.get(key) is None, f"{key} is here already"
        self._waiting[key] = PrefillSequence(
            key=key,
            gateway=gateway,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            sampling=request.sampling,
            arrival_s=now - request.age_s,
            hashes=hash_blocks(token_ids, self._blocks.block_size),
            token_ids=token_ids,
        )

    def cancel(self, key: SequenceKey) -> None:
        """Forget the sequence and give its blocks back, at whatever stage. Unknown keys are fine."""
        for queue in (self._waiting, self._running, self._handoffs):
            if sequence := queue.pop(key, None):
                self._blocks.release(sequence.block_table)

    def renew(self, key: SequenceKey, now: float) -> None:
        """The gateway still wants this handoff, or what an attempt at this request has left in the cache."""
        until_s = now + self._lease_s
        if sequence := self._handoffs.get(key):
            sequence.lease_until_s = until_s
        self._blocks.renew(key.request_id, until_s)

    def release(self, key: SequenceKey) -> bool:
        """The receiver has the blocks: they stay cached, owned by nobody but protected. False if it was none."""
        sequence = self._handoffs.pop(key, None)
        if sequence:
            self._blocks.release(sequence.block_table)
        return sequence is not None

    def pop_expired(self, now: float) -> list[PrefillSequence]:
        """Give up handoffs whose lease ran out, and protect no longer what is cached of them."""
        self._blocks.unprotect_expired(now)
        expired = [sequence for sequence in self._handoffs.values() if sequence.lease_until_s < now]
        for sequence in expired:
            self.release(sequence.key)
        return expired

    def take(self, key: SequenceKey) -> PrefillSequence:
        """Give a handoff up without releasing its blocks, which are the caller's from now on."""
        self._blocks.unprotect(key.request_id)
        return self._handoffs.pop(key)

    def schedule(self, now: float, tenants: Tenants | None = None) -> StepPlan | None:
        """Plan the next step and start the sequences that get their first chunk in it. None: nothing to do."""
        candidates = sorted(self._candidates(tenants), key=lambda candidate: candidate.urgency)
        remaining = [candidate.num_remaining for candidate in candidates]
        budget = self._budget_tokens()
        chunks = assign_chunks(remaining, budget, SHORT_SHARE)
        if held := self._hold(candidates, chunks, now):
            wanted = [num_tokens - (index in held) for index, num_tokens in enumerate(remaining)]
            chunks = assign_chunks(wanted, budget, SHORT_SHARE)
        chosen = [pair for pair in zip(candidates, chunks, strict=True) if pair[1]]
        self._start([candidate for candidate, _ in chosen if candidate.sequence.key in self._waiting])
        planned = tuple(self._plan_chunk(candidate.sequence, chunk) for candidate, chunk in chosen)
        return StepPlan(planned) if planned else None

    def _hold(self, candidates: Sequence[Candidate], chunks: Sequence[int], now: float) -> set[int]:
        """Which of those that would end in this step wait for the next one that would not: all that may, or none."""
        pairs = list(zip(candidates, chunks, strict=True))
        others = [candidate.num_remaining for candidate, chunk in pairs if chunk < candidate.num_remaining]
        if not self._hold_share or not self._tokens_per_s or not others:
            return set()
        ends = [index for index, (candidate, chunk) in enumerate(pairs) if chunk == candidate.num_remaining]
        held = {index for index in ends if candidates[index].sequence.may_be_held}
        ready_s = now + others[0] / self._tokens_per_s
        if any(ready_s > self._hold_until_s(candidates[index], now) for index in held):
            return set()
        for index in held:
            sequence = candidates[index].sequence
            if sequence.held_since_s is None:
                sequence.held_since_s = now
        return held

    def _hold_until_s(self, candidate: Candidate, now: float) -> float:
        held_since_s = candidate.sequence.held_since_s
        return hold_until_s(candidate.patient_until_s, now if held_since_s is None else held_since_s, self._hold_share)

    def _candidates(self, tenants: Tenants | None) -> list[Candidate]:
        """Sequences that may compute now.

        A waiting sequence that does not get its blocks is not overtaken by one that came after it.
        """
        available = self._blocks.num_available
        found = [self._candidate(sequence, []) for sequence in self._running.values()]
        for sequence in sorted(self._waiting.values(), key=lambda s: s.age_order):
            cached = self._match(sequence)
            available -= self._num_blocks_to_start(sequence, cached)
            if available < 0 or (tenants and not tenants.admit(len(found), available)):
                break
            found.append(self._candidate(sequence, cached))
        return found

    def _candidate(self, sequence: PrefillSequence, cached: list[BlockId]) -> Candidate:
        num_shared = len(cached) * self._blocks.block_size
        num_tokens = len(sequence.token_ids) - sequence.num_cached - num_shared
        return Candidate(
            sequence=sequence,
            cached=cached,
            num_remaining=sequence.num_remaining - num_shared,
            patient_until_s=patient_until_s(sequence.arrival_s, num_tokens, self._tokens_per_s),
        )

    def _match(self, sequence: PrefillSequence) -> list[BlockId]:
        """Cached blocks of its prefix. Its last token is always computed, for the logits."""
        most = num_shareable_blocks(len(sequence.token_ids), self._blocks.block_size)
        return self._blocks.match(sequence.hashes[:most])

    def _num_blocks_to_start(self, sequence: PrefillSequence, cached: list[BlockId]) -> int:
        fresh = self._blocks.num_blocks_for(len(sequence.token_ids)) - len(cached)
        return fresh + self._blocks.num_evictable(cached)

    def _start(self, starting: Sequence[Candidate]) -> None:
        """Reserve all their blocks: what one of them shares is not evicted for another one."""
        for candidate in starting:
            self._blocks.share(candidate.cached)
        for candidate in starting:
            sequence, cached = candidate.sequence, candidate.cached
            fresh = self._blocks.num_blocks_for(len(sequence.token_ids)) - len(cached)
            sequence.block_table = cached + self._blocks.allocate(fresh)
            sequence.checksums = [self._blocks.checksums(block_id) for block_id in cached]
            sequence.num_computed = sequence.num_cached = len(cached) * self._blocks.block_size
            self._running[sequence.key] = self._waiting.pop(sequence.key)

    def _plan_chunk(self, sequence: PrefillSequence, chunk: int) -> ScheduledSequence:
        start, end = sequence.num_computed, min(sequence.num_computed + chunk, len(sequence.token_ids))
        is_last = end == len(sequence.token_ids)
        block_size = self._blocks.block_size
        sealed_end = self._blocks.num_blocks_for(end) if is_last else end // block_size
        return ScheduledSequence(
            key=sequence.key,
            token_ids=sequence.token_ids[start:end],
            start=start,
            block_table=sequence.block_table,
            sampling=sequence.sampling if is_last else None,
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            seal=tuple(sequence.block_table[start // block_size : sealed_end]),
        )

    def _budget_tokens(self) -> int:
        if self._max_step_s == 0:
            return self._max_batch_tokens
        wanted = int(self._tokens_per_s * self._max_step_s) if self._tokens_per_s else FIRST_BUDGET_TOKENS
        return min(self._max_batch_tokens, max(MIN_BUDGET_TOKENS, wanted))

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[PrefillEvent]:
        """Take in what a step brought."""
        self._measure(plan, result)
        events: list[PrefillEvent] = []
        for planned in plan.sequences:
            sequence = self._running.get(planned.key)
            if sequence is None:
                continue
            if reason := result.failed.get(planned.key):
                self.cancel(planned.key)
                events.append(PrefillFailed(sequence, reason))
                continue
            self._seal(sequence, planned, result)
            sequence.num_computed += len(planned.token_ids)
            if planned.sampling is not None:
                events.append(self._finish(sequence, result.sampled[planned.key], now))
        return events

    def _measure(self, plan: StepPlan, result: StepResult) -> None:
        if result.duration_s <= 0:
            return
        rate = plan.num_tokens / result.duration_s
        old = self._tokens_per_s or rate
        self._tokens_per_s = old + RATE_SMOOTHING * (rate - old)

    def _seal(self, sequence: PrefillSequence, planned: ScheduledSequence, result: StepResult) -> None:
        for block_id in planned.seal:
            index, checksums = len(sequence.checksums), result.checksums[block_id]
            assert sequence.block_table[index] == block_id
            sequence.checksums.append(checksums)
            if index < len(sequence.hashes):
                self._blocks.seal(block_id, sequence.hashes[index], checksums)

    def _finish(self, sequence: PrefillSequence, token_id: int, now: float) -> Prefilled:
        finish = check_finish(sequence.sampling, (*sequence.output_token_ids, token_id))
        del self._running[sequence.key]
        if finish:
            self._blocks.release(sequence.block_table)
        else:
            sequence.lease_until_s = now + self._lease_s
            self._blocks.protect(sequence.key.request_id, sequence.hashes, sequence.lease_until_s)
            self._handoffs[sequence.key] = sequence
        return Prefilled(sequence, token_id, finish)
