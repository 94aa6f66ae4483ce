"""A plan's tensors, against a reference that goes token by token."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.engine.batch import Batch, build_batch
from common.engine.step import ScheduledSequence, StepPlan
from common.ids import BlockId, RequestId, SequenceKey
from common.sampling import SamplingParams


def make_sequence(
    name: str, token_ids: Sequence[int], start: int, block_table: Sequence[int], *, is_sampled: bool = True
) -> ScheduledSequence:
    return ScheduledSequence(
        key=SequenceKey(RequestId(name), 0),
        token_ids=token_ids,
        start=start,
        block_table=[BlockId(block) for block in block_table],
        sampling=SamplingParams(max_tokens=1) if is_sampled else None,
        prompt_token_ids=(),
        output_token_ids=(),
    )


def test_a_mixed_plan_puts_single_tokens_first() -> None:
    chunk = make_sequence("chunk", [11, 12, 13], 3, [7, 2], is_sampled=False)
    single = make_sequence("single", [21], 8, [5, 9, 1])
    prompt = make_sequence("prompt", [31, 32], 0, [4])
    batch = build_batch(StepPlan((chunk, single, prompt)), block_size=4)
    assert batch.input_ids.tolist() == [21, 11, 12, 13, 31, 32]
    assert batch.rows.positions.tolist() == [8, 3, 4, 5, 0, 1]
    assert batch.rows.slot_mapping.tolist() == [4, 31, 8, 9, 16, 17]
    assert batch.rows.num_decode_rows == 1
    assert batch.rows.decode is not None
    assert batch.rows.decode.block_tables.tolist() == [[5, 9, 1]]
    assert batch.rows.decode.context_lens.tolist() == [9]
    assert batch.rows.prefill is not None
    assert batch.rows.prefill.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.rows.prefill.context_lens.tolist() == [6, 2]
    assert batch.rows.prefill.block_tables[:, :2].tolist() == [[7, 2], [4, 0]]
    assert batch.rows.prefill.max_seqlen == 3
    assert batch.sampled == (single, prompt)
    assert batch.sampled_rows.tolist() == [0, 5]


def test_blocks_beyond_the_context_are_not_in_the_table() -> None:
    batch = build_batch(StepPlan((make_sequence("a", [1], 3, [6, 8, 9]),)), block_size=4)
    assert batch.rows.decode is not None
    assert batch.rows.decode.block_tables.tolist() == [[6]]
    assert batch.rows.prefill is None


def test_a_plan_that_samples_nothing_has_no_sampled_rows() -> None:
    batch = build_batch(StepPlan((make_sequence("a", [1, 2], 0, [0], is_sampled=False),)), block_size=4)
    assert batch.sampled == ()
    assert batch.sampled_rows.tolist() == []
    assert batch.rows.decode is None


def test_dtypes_are_those_that_the_ops_document() -> None:
    plan = StepPlan((make_sequence("a", [1], 0, [0]), make_sequence("b", [1, 2], 0, [1])))
    batch = build_batch(plan, block_size=4)
    assert batch.rows.decode is not None
    assert batch.rows.prefill is not None
    wide = (batch.input_ids, batch.rows.positions, batch.rows.slot_mapping, batch.sampled_rows)
    assert {tensor.dtype for tensor in wide} == {torch.int64}
    narrow = (
        *(batch.rows.decode.block_tables, batch.rows.decode.context_lens),
        *(batch.rows.prefill.block_tables, batch.rows.prefill.context_lens, batch.rows.prefill.cu_seqlens),
    )
    assert {tensor.dtype for tensor in narrow} == {torch.int32}


def test_a_sequence_without_tokens_or_blocks_is_a_bug_that_is_named() -> None:
    with pytest.raises(AssertionError, match="must have tokens"):
        build_batch(StepPlan((make_sequence("a", [], 0, [0]),)), block_size=4)
    with pytest.raises(AssertionError, match="needs 2 blocks"):
        build_batch(StepPlan((make_sequence("a", [1], 4, [0]),)), block_size=4)


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, int]:
    """A plan and its block size. Every sequence has blocks of its own, some more than it needs."""
    block_size = draw(st.sampled_from([1, 3, 16]))
    next_block = itertools.count(1)
    sequences: list[ScheduledSequence] = []
    for index in range(draw(st.integers(1, 6))):
        start, count = draw(st.integers(0, 40)), draw(st.one_of(st.just(1), st.integers(1, 40)))
        num_blocks = -(-(start + count) // block_size) + draw(st.integers(0, 2))
        blocks = draw(st.permutations([next(next_block) for _ in range(num_blocks)]))
        token_ids = draw(st.lists(st.integers(0, 999), min_size=count, max_size=count))
        sequences.append(make_sequence(str(index), token_ids, start, blocks, is_sampled=draw(st.booleans())))
    return StepPlan(tuple(sequences)), block_size


@given(plans())
def test_every_row_is_where_a_naive_reference_puts_it(plan_and_size: tuple[StepPlan, int]) -> None:
    plan, block_size = plan_and_size
    batch = build_batch(plan, block_size)
    rows: list[tuple[int, int, int]] = []
    sampled_rows: list[int] = []
    ordered = sorted(plan.sequences, key=lambda sequence: len(sequence.token_ids) > 1)
    for sequence in ordered:
        for offset, token_id in enumerate(sequence.token_ids):
            position = sequence.start + offset
            slot = sequence.block_table[position // block_size] * block_size + position % block_size
            rows.append((token_id, position, slot))
        if sequence.sampling is not None:
            sampled_rows.append(len(rows) - 1)
    got = (batch.input_ids.tolist(), batch.rows.positions.tolist(), batch.rows.slot_mapping.tolist())
    assert list(zip(*got, strict=True)) == rows
    assert batch.sampled_rows.tolist() == sampled_rows
    assert list(batch.sampled) == [sequence for sequence in ordered if sequence.sampling is not None]
    check_attention_rows(batch, ordered, block_size)


def check_attention_rows(batch: Batch, ordered: Sequence[ScheduledSequence], block_size: int) -> None:
    singles = [sequence for sequence in ordered if len(sequence.token_ids) == 1]
    runs = ordered[len(singles) :]
    assert batch.rows.num_decode_rows == len(singles)
    assert (batch.rows.decode is not None, batch.rows.prefill is not None) == (bool(singles), bool(runs))
    for part, sequences in ((batch.rows.decode, singles), (batch.rows.prefill, runs)):
        if part is None:
            continue
        lens = [sequence.start + len(sequence.token_ids) for sequence in sequences]
        assert part.context_lens.tolist() == lens
        for table, length, sequence in zip(part.block_tables.tolist(), lens, sequences, strict=True):
            count = -(-length // block_size)
            assert table[:count] == sequence.block_table[:count]
    if batch.rows.prefill is not None:
        num_tokens = [len(sequence.token_ids) for sequence in runs]
        assert batch.rows.prefill.cu_seqlens.tolist() == [0, *itertools.accumulate(num_tokens)]
        assert batch.rows.prefill.max_seqlen == max(num_tokens)
