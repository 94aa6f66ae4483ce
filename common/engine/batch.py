"""A step plan as the tensors that the model and its ops take."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.engine.step import ScheduledSequence, StepPlan
from kernels.token_rows import DecodeRows, PrefillRows, TokenRows

IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Batch:
    """One row a token.

    input_ids:     [num_tokens] int64
    rows:          where they belong
    sampled_rows:  [num_sampled] int64: the rows whose logits are wanted
    sampled:       the sequences of these rows
    """

    input_ids: Tensor
    rows: TokenRows
    sampled_rows: Tensor
    sampled: tuple[ScheduledSequence, ...]

    def to(self, device: torch.device) -> "Batch":
        """The same on a device; itself where it is there already."""
        if device.type == "cpu":
            return self
        rows = self.rows
        return Batch(
            self.input_ids.to(device, non_blocking=True),
            TokenRows(
                rows.positions.to(device, non_blocking=True),
                rows.slot_mapping.to(device, non_blocking=True),
                rows.num_decode_rows,
                rows.decode and DecodeRows(*_all_to(device, rows.decode.block_tables, rows.decode.context_lens)),
                rows.prefill and _prefill_to(device, rows.prefill),
            ),
            self.sampled_rows.to(device, non_blocking=True),
            self.sampled,
        )


def _prefill_to(device: torch.device, rows: PrefillRows) -> PrefillRows:
    cu_seqlens, tables, context_lens = _all_to(device, rows.cu_seqlens, rows.block_tables, rows.context_lens)
    return PrefillRows(cu_seqlens, rows.max_seqlen, tables, context_lens)


def _all_to(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(device, non_blocking=True) for tensor in tensors]


def build_batch(plan: StepPlan, block_size: int) -> Batch:
    """Lay out the plan's sequences. Every one has at least one token, and blocks for all of its context."""
    single = [sequence for sequence in plan.sequences if len(sequence.token_ids) == 1]
    several = [sequence for sequence in plan.sequences if len(sequence.token_ids) != 1]
    sequences = single + several
    lens = np.array([len(sequence.token_ids) for sequence in sequences], dtype=np.int64)
    assert lens.all(), "a scheduled sequence must have tokens"
    starts = np.array([sequence.start for sequence in sequences], dtype=np.int64)
    ends = np.cumsum(lens)
    num_tokens = int(lens.sum())
    block_tables = _block_tables(sequences, starts + lens, block_size)
    # For every row, which sequence it is of, and its position there.
    row_sequences = np.repeat(np.arange(len(sequences)), lens)
    positions = np.arange(num_tokens) + np.repeat(starts - (ends - lens), lens)
    slots = block_tables[row_sequences, positions // block_size].astype(np.int64) * block_size + positions % block_size
    is_sampled = np.array([sequence.sampling is not None for sequence in sequences], dtype=bool)
    token_ids = chain.from_iterable(sequence.token_ids for sequence in sequences)
    return Batch(
        input_ids=torch.from_numpy(np.fromiter(token_ids, dtype=np.int64, count=num_tokens)),
        rows=TokenRows(
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            num_decode_rows=len(single),
            decode=_decode_rows(block_tables[: len(single)], starts[: len(single)]),
            prefill=_prefill_rows(block_tables[len(single) :], starts[len(single) :], lens[len(single) :]),
        ),
        sampled_rows=torch.from_numpy(ends[is_sampled] - 1),
        sampled=tuple(sequence for sequence in sequences if sequence.sampling is not None),
    )


def _block_tables(sequences: Sequence[ScheduledSequence], context_lens: IntArray, block_size: int) -> IntArray:
    """[num_seqs, max_blocks] int32, zero past each sequence's last block."""
    num_blocks = -(-context_lens // block_size)
    tables = np.zeros((len(sequences), int(num_blocks.max(initial=0))), dtype=np.int32)
    for table, sequence, count in zip(tables, sequences, num_blocks.tolist(), strict=True):
        assert len(sequence.block_table) >= count, f"{sequence.key} needs {count} blocks, got {sequence.block_table}"
        table[:count] = sequence.block_table[:count]
    return tables


def _decode_rows(block_tables: IntArray, starts: IntArray) -> DecodeRows | None:
    if len(starts) == 0:
        return None
    return DecodeRows(*_to_int32(block_tables, starts + 1))


def _prefill_rows(block_tables: IntArray, starts: IntArray, lens: IntArray) -> PrefillRows | None:
    if len(starts) == 0:
        return None
    cu_seqlens, tables, context_lens = _to_int32(np.concatenate(([0], np.cumsum(lens))), block_tables, starts + lens)
    return PrefillRows(cu_seqlens, int(lens.max()), tables, context_lens)


def _to_int32(*arrays: IntArray) -> list[Tensor]:
    return [torch.from_numpy(array.astype(np.int32)) for array in arrays]
