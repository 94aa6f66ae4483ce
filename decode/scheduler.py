"""Which sequences are pulled and which run in the next step. Pure: no torch, no sockets, no clock."""

from dataclasses import dataclass, field

from common.block_hashes import BlockHash, hash_blocks
from common.engine.block_manager import BlockManager
from common.engine.step import ScheduledSequence, StepPlan, StepResult
from common.ids import BlockId, PeerId, SequenceKey
from common.kv_source import KVDescriptor
from common.sampling import Finish, SamplingParams, check_finish
from common.wire import DecodeRequest
from kvtransfer.transport import BlockCopy

WATERMARK = 0.01
"""Share of the blocks that admission leaves free, so that running sequences can grow without preempting at once."""


@dataclass(slots=True)
class DecodeSequence:
    """One attempt at one request, from arrival to its end.

    Mutable state: output_token_ids grows by a token a step; block_table from admission on;
    is_cancelled while a pull that nobody wants any more comes to its end.
    num_computed: tokens whose KV is in the cache; the last output token's never is before its step.
    kv:           what is pulled, hashes its full blocks; None where the prompt was computed in this very cache
    """

    key: SequenceKey
    gateway: PeerId
    prompt_token_ids: tuple[int, ...]
    output_token_ids: list[int]
    sampling: SamplingParams
    arrival_s: float
    num_computed: int
    kv: KVDescriptor | None = None
    hashes: list[BlockHash] = field(default_factory=list[BlockHash])
    block_table: list[BlockId] = field(default_factory=list[BlockId])
    num_shared: int = 0
    is_cancelled: bool = False

    @property
    def age_order(self) -> tuple[float, SequenceKey]:
        return (self.arrival_s, self.key)

    @property
    def pulled_kv(self) -> KVDescriptor:
        """Only of a sequence that was handed over."""
        assert self.kv is not None, f"the prompt of {self.key} was computed here"
        return self.kv


@dataclass(frozen=True, slots=True)
class Decoded:
    """Event: a new token, at this index of the output. With finish its blocks are free."""

    sequence: DecodeSequence
    index: int
    token_id: int
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """Event: the step could not serve this sequence; its blocks are free."""

    sequence: DecodeSequence
    reason: str


DecodeEvent = Decoded | DecodeFailed


class DecodeScheduler:
    """The life of sequences on a decode worker.

    Mutable state: three disjoint maps by key (waiting, pulling, running).
    """

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int) -> None:
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._watermark = max(1, int(blocks.num_blocks * WATERMARK))
        self._waiting: dict[SequenceKey, DecodeSequence] = {}
        self._pulling: dict[SequenceKey, DecodeSequence] = {}
        self._running: dict[SequenceKey, DecodeSequence] = {}

    @property
    def max_context(self) -> int:
        return self._blocks.num_blocks * self._blocks.block_size

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_pulling(self) -> int:
        return len(self._pulling)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(sequence.num_computed for sequence in self._waiting.values())

    def waiting(self) -> list[DecodeSequence]:
        return list(self._waiting.values())

    def sequences(self) -> list[DecodeSequence]:
        return [*self._waiting.values(), *self._pulling.values(), *self._running.values()]

    def get(self, key: SequenceKey) -> DecodeSequence | None:
        return self._waiting.get(key) or self._pulling.get(key) or self._running.get(key)

    def add(self, request: DecodeRequest, gateway: PeerId, now: float) -> None:
        """Queue a sequence that is new here and whose descriptor was checked."""
        key = SequenceKey(request.request_id, request.attempt)
        assert self.get(key) is None
        token_ids = request.prompt_token_ids + request.output_token_ids
        self._waiting[key] = DecodeSequence(
            key=key,
            gateway=gateway,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=list(request.output_token_ids),
            sampling=request.sampling,
            arrival_s=now - request.age_s,
            num_computed=request.kv.num_tokens,
            kv=request.kv,
            hashes=hash_blocks(token_ids[: request.kv.num_tokens], self._blocks.block_size),
        )

    def adopt(self, sequence: DecodeSequence) -> None:
        """Run a sequence that is new here and whose KV is in this cache already; its blocks are ours to release."""
        assert self.get(sequence.key) is None, f"{sequence.key} is here already"
        self._running[sequence.key] = sequence

    def cancel(self, key: SequenceKey) -> bool:
        """Forget the sequence and give its blocks back. Unknown keys are fine.

        Returns True for one that is being pulled: the pull must be aborted, and its blocks come back
        with `pulled`, when nothing writes into them any more.
        """
        if sequence := self._pulling.get(key):
            is_first = not sequence.is_cancelled
            sequence.is_cancelled = True
            return is_first
        for queue in (self._waiting, self._running):
            if sequence := queue.pop(key, None):
                self._blocks.release(sequence.block_table)
        return False

    def admit(self) -> list[DecodeSequence]:
        """Reserve blocks for waiting sequences, resumed ones first, then the oldest; nobody is overtaken.

        Returns those whose pull is to be started (`copies`).
        """
        admitted: list[DecodeSequence] = []
        for sequence in sorted(self._waiting.values(), key=lambda s: (s.key.attempt == 0, s.age_order)):
            if len(self._running) + len(self._pulling) >= self._max_num_seqs or not self._reserve(sequence):
                break
            del self._waiting[sequence.key]
            self._pulling[sequence.key] = sequence
            admitted.append(sequence)
        return admitted

    def _reserve(self, sequence: DecodeSequence) -> bool:
        """Blocks for its KV and the next token, above the watermark unless it has the pool for itself."""
        shared = self._blocks.match(sequence.hashes)
        fresh = self._blocks.num_blocks_for(sequence.num_computed + 1) - len(shared)
        is_alone = not (self._running or self._pulling)
        spare = 0 if is_alone else self._watermark
        if fresh + self._blocks.num_evictable(shared) + spare > self._blocks.num_available:
            return False
        self._blocks.share(shared)
        sequence.block_table = shared + self._blocks.allocate(fresh)
        sequence.num_shared = len(shared)
        return True

    def copies(self, sequence: DecodeSequence) -> tuple[BlockCopy, ...]:
        """What an admitted sequence has to pull: every block that was not in the prefix cache."""
        first, kv = sequence.num_shared, sequence.pulled_kv
        targets = sequence.block_table[first : len(kv.block_ids)]
        triples = zip(kv.block_ids[first:], targets, kv.checksums[first:], strict=True)
        return tuple(BlockCopy(source, target, checksums) for source, target, checksums in triples)

    def pulled(self, key: SequenceKey, is_complete: bool) -> DecodeSequence | None:
        """A pull ended, and nothing writes into its targets any more.

        Returns the sequence if it is still wanted: running when complete, otherwise given up.
        """
        sequence = self._pulling.pop(key)
        if is_complete:
            self._seal(sequence)
        if sequence.is_cancelled or not is_complete:
            self._blocks.release(sequence.block_table)
        else:
            self._running[key] = sequence
        return None if sequence.is_cancelled else sequence

    def _seal(self, sequence: DecodeSequence) -> None:
        for index in range(sequence.num_shared, len(sequence.hashes)):
            self._blocks.seal(sequence.block_table[index], sequence.hashes[index], sequence.pulled_kv.checksums[index])

    def schedule(self) -> tuple[StepPlan | None, list[DecodeSequence]]:
        """One token for every running sequence. Returns the plan and whom it preempted, blocks free.

        The youngest is preempted until the older ones have their blocks; the oldest never is.
        Where it lacks a block that a pull or a prompt in the same cache holds, it waits for their end.
        """
        by_age = sorted(self._running.values(), key=lambda s: s.age_order)
        planned: list[ScheduledSequence] = []
        preempted: list[DecodeSequence] = []
        while len(planned) < len(by_age):
            sequence = by_age[len(planned)]
            if self._has_room(sequence):
                planned.append(self._plan_token(sequence))
            elif len(by_age) > 1:
                youngest = by_age.pop()
                self.cancel(youngest.key)
                preempted.append(youngest)
            else:
                is_alone = self._blocks.num_owned == len(sequence.block_table)
                assert not is_alone, "the only sequence does not fit, although the gateway's limit says that it does"
                break
        return (StepPlan(tuple(planned)) if planned else None), preempted

    def _has_room(self, sequence: DecodeSequence) -> bool:
        missing = self._blocks.num_blocks_for(sequence.num_computed + 1) - len(sequence.block_table)
        if missing > self._blocks.num_available:
            return False
        sequence.block_table += self._blocks.allocate(missing)
        return True

    def _plan_token(self, sequence: DecodeSequence) -> ScheduledSequence:
        return ScheduledSequence(
            key=sequence.key,
            token_ids=sequence.output_token_ids[-1:],
            start=sequence.num_computed,
            block_table=sequence.block_table,
            sampling=sequence.sampling,
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
        )

    def update(self, plan: StepPlan, result: StepResult) -> list[DecodeEvent]:
        """Take in what a step brought."""
        events: list[DecodeEvent] = []
        for planned in plan.sequences:
            sequence = self._running.get(planned.key)
            if sequence is None:
                continue
            if reason := result.failed.get(planned.key):
                self.cancel(planned.key)
                events.append(DecodeFailed(sequence, reason))
                continue
            events.append(self._append(sequence, result.sampled[planned.key]))
        return events

    def _append(self, sequence: DecodeSequence, token_id: int) -> Decoded:
        index = len(sequence.output_token_ids)
        sequence.output_token_ids.append(token_id)
        sequence.num_computed += 1
        finish = check_finish(sequence.sampling, sequence.output_token_ids)
        if finish:
            self.cancel(sequence.key)
        return Decoded(sequence, index, token_id, finish)
