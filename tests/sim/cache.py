"""A worker's cache, with tokens in place of keys and values, and a guard who knows what may be written by whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from common.engine.step import ScheduledSequence, StepPlan, StepResult
from common.errors import GroupFailed
from common.ids import BlockId, RequestId, SequenceKey
from common.kv_layout import HeadChecksums, KVLayout, head_checksums
from kvtransfer.transport import PullFinished, StartPull
from tests.fakes import next_token

WORD_BYTES = 4


class Guard:
    """Knows which blocks are written by pulls, and that no step writes into these.

    Mutable state: pulls under way, and their targets.
    """

    def __init__(self) -> None:
        self.pulls: dict[SequenceKey, StartPull] = {}
        self._targets: dict[BlockId, SequenceKey] = {}

    def start(self, pull: StartPull) -> None:
        assert pull.key not in self.pulls, f"{pull.key} is pulled twice"
        self.pulls[pull.key] = pull
        for copy in pull.copies:
            assert copy.target not in self._targets, (
                f"{pull.key} is pulled into a block of {self._targets[copy.target]}"
            )
            self._targets[copy.target] = pull.key

    def finish(self, finished: PullFinished) -> None:
        assert finished.key in self.pulls, f"the pull of {finished.key} ends that did not begin, or twice"
        for copy in self.pulls.pop(finished.key).copies:
            del self._targets[copy.target]

    def check_pulled(self, block_id: int) -> None:
        assert block_id in self._targets, f"bytes come into block {block_id}, for which no pull is under way"

    def check_computed(self, key: SequenceKey, block_id: BlockId) -> None:
        puller = self._targets.get(block_id)
        assert puller is None, f"a step writes {key} into block {block_id}, into which {puller} is pulled"


class PulledMemory:
    """A rank's part of a cache as its puller sees it: whatever it takes a piece of, it writes into."""

    def __init__(self, memory: memoryview, block_bytes: int, guard: Guard) -> None:
        self.nbytes = memory.nbytes
        self._memory = memory
        self._block_bytes = block_bytes
        self._guard = guard

    def __getitem__(self, part: slice) -> memoryview:
        self._guard.check_pulled(part.start // self._block_bytes)
        return self._memory[part]


class Cache:
    """Memory of all ranks of a worker. Every KV head holds the tokens of its block, and then zeros.

    memory: by rank, [num_blocks, heads of the rank, head_bytes]
    """

    def __init__(self, num_blocks: int, layout: KVLayout, num_ranks: int, guard: Guard) -> None:
        assert layout.num_kv_heads % num_ranks == 0
        self.layout = layout
        self.num_ranks = num_ranks
        self.rank_heads = layout.num_kv_heads // num_ranks
        self.memory = [memoryview(bytearray(num_blocks * self.rank_bytes)) for _ in range(num_ranks)]
        self._guard = guard
        self._words = [memory.cast("I") for memory in self.memory]
        self._head_words = layout.head_bytes // WORD_BYTES
        self._starts = range(0, self.rank_heads * self._head_words, self._head_words)

    @property
    def rank_bytes(self) -> int:
        """Of a block at one rank."""
        return self.rank_heads * self.layout.head_bytes

    def pulled(self, rank: int) -> PulledMemory:
        return PulledMemory(self.memory[rank], self.rank_bytes, self._guard)

    def write(self, sequence: ScheduledSequence) -> None:
        """A step computes these tokens."""
        block_size = self.layout.block_size
        rank_words = self.rank_heads * self._head_words
        for position, token_id in enumerate(sequence.token_ids, sequence.start):
            block_id = sequence.block_table[position // block_size]
            offset = position % block_size
            if position == sequence.start or not offset:
                self._guard.check_computed(sequence.key, block_id)
            for words in self._words:
                for start in self._starts:
                    words[block_id * rank_words + start + offset] = token_id

    def check(self, sequence: ScheduledSequence, token_ids: list[int]) -> None:
        """The cache holds this sequence, at every rank and head."""
        block_size, num_tokens = self.layout.block_size, len(token_ids)
        rank_words = self.rank_heads * self._head_words
        for words in self._words:
            for start in self._starts:
                stored: list[int] = []
                for block_id in sequence.block_table:
                    first = block_id * rank_words + start
                    stored += words[first : first + block_size]
                assert stored[:num_tokens] == token_ids, f"{sequence.key}: {stored} is cached, {token_ids} are wanted"

    def checksums(self, block_id: BlockId) -> HeadChecksums:
        size = self.rank_bytes
        parts = [memory[block_id * size : (block_id + 1) * size] for memory in self.memory]
        return tuple(checksum for part in parts for checksum in head_checksums(part, self.layout.head_bytes))


class Died(BaseException):
    """The process ends with this step."""


class Runner:
    """The fake model: computes tokens into a cache, and looks whether all is right there before it samples.

    poisons: requests that kill whoever runs them
    step_s:  of an ordinary step
    Mutable: busy_s, how long the latest step took; slowness, which it is longer by; hangs_s: how long the next step
    hangs before it fails, for a rank has failed; before_step: what is done before each.
    """

    def __init__(self, cache: Cache, random: Random, step_s: float, poisons: set[RequestId]) -> None:
        self.slowness = 1.0
        self.busy_s = 0.0
        self.hangs_s = 0.0
        self.before_step: Callable[[], None] = lambda: None
        self._cache = cache
        self._random = random
        self._step_s = step_s
        self._poisons = poisons

    def claim_cores(self) -> None:
        """There are no cores here that others could use."""

    def rest(self) -> None:
        """Nor here."""

    def others_want_cores(self) -> bool:
        return False

    def execute(self, plan: StepPlan) -> StepResult:
        self.busy_s = self._step_s * self.slowness * self._random.uniform(0.5, 1.5)
        self.before_step()
        if self.hangs_s:
            raise GroupFailed("a rank has failed")
        if any(sequence.key.request_id in self._poisons for sequence in plan.sequences):
            raise Died
        for sequence in plan.sequences:
            self._cache.write(sequence)
        sampled = {s.key: self._sample(s) for s in plan.sequences if s.sampling is not None}
        sealed = {block_id for s in plan.sequences for block_id in s.seal}
        checksums = {block_id: self._cache.checksums(block_id) for block_id in sealed}
        return StepResult(sampled=sampled, checksums=checksums, duration_s=self.busy_s)

    def _sample(self, sequence: ScheduledSequence) -> int:
        token_ids = [*sequence.prompt_token_ids, *sequence.output_token_ids]
        assert sequence.sampling is not None
        assert len(token_ids) == sequence.start + len(sequence.token_ids)
        self._cache.check(sequence, token_ids)
        return next_token(token_ids, sequence.sampling)


def num_references(tables: Sequence[Sequence[BlockId]], num_blocks: int) -> list[int]:
    """How many of these block tables have each block."""
    counts = [0] * num_blocks
    for table in tables:
        for block_id in table:
            counts[block_id] += 1
    return counts
