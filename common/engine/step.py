"""What a scheduler asks of a runner, and what comes back. Free of torch.

There is no prefill step and no decode step: a sequence's computed tokens catch up with its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.ids import BlockId, SequenceKey
from common.kv_layout import HeadChecksums
from common.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """One sequence's part of a step. All sequences are borrowed: the runner neither keeps nor changes them.

    token_ids:    to compute in this step; their positions are start, start + 1, …
    start:        tokens whose KV is already in the cache
    block_table:  covers at least start + len(token_ids) tokens
    sampling:     None when nothing is sampled (an inner chunk of a prompt)
    prompt_token_ids, output_token_ids: the whole sequence so far, for penalties and min_tokens;
                  the sampled token has output index len(output_token_ids) and
                  position start + len(token_ids), the counter of its noise
    seal:         blocks that no later step will write; their checksums are wanted
    """

    key: SequenceKey
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[BlockId]
    sampling: SamplingParams | None
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    seal: Sequence[BlockId] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. Each key and each written block occurs once."""

    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def num_pairs(self) -> int:
        """Of a token that is computed and one that it may look at."""
        return sum(_num_pairs(sequence.start, len(sequence.token_ids)) for sequence in self.sequences)


def _num_pairs(start: int, num_tokens: int) -> int:
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step brought.

    sampled:    the token of every sequence that asked for one and did not fail
    failed:     sequences that the step could not serve, and why; others are not affected
    checksums:  of each sealed block
    """

    sampled: dict[SequenceKey, int]
    failed: dict[SequenceKey, str] = field(default_factory=dict)
    checksums: dict[BlockId, HeadChecksums] = field(default_factory=dict)
    duration_s: float = 0.0
