"""Steps to be measured, without a scheduler. Pure."""

from collections.abc import Sequence

from common.engine.step import ScheduledSequence, StepPlan
from common.ids import BlockId, RequestId, SequenceKey
from common.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=2**30, temperature=0.0)


def num_blocks_for(batch: int, num_tokens: int, block_size: int) -> int:
    """Of sequences of so many tokens each, which share no block."""
    return batch * -(-num_tokens // block_size)


def decode_plan(batch: int, context: int, block_size: int) -> StepPlan:
    """A token of each sequence, the last of its context. Sequence i has the i-th run of blocks."""
    num_blocks = num_blocks_for(1, context, block_size)
    return StepPlan(
        tuple(_scheduled(index, [index + 1], context - 1, index * num_blocks, num_blocks) for index in range(batch))
    )


def prompt_plan(token_ids: Sequence[int], start: int, block_size: int) -> StepPlan:
    """Tokens of one sequence that has the first blocks; start: those that were computed before."""
    num_blocks = num_blocks_for(1, start + len(token_ids), block_size)
    return StepPlan((_scheduled(0, token_ids, start, 0, num_blocks),))


def prompt_tokens(num: int, vocab_size: int) -> list[int]:
    """Spread over the vocabulary."""
    return [7919 * index % vocab_size for index in range(1, num + 1)]


def _scheduled(number: int, token_ids: Sequence[int], start: int, first: int, num_blocks: int) -> ScheduledSequence:
    return ScheduledSequence(
        key=SequenceKey(RequestId(str(number)), 0),
        token_ids=token_ids,
        start=start,
        block_table=[BlockId(block_id) for block_id in range(first, first + num_blocks)],
        sampling=GREEDY,
        prompt_token_ids=(),
        output_token_ids=(),
    )
