"""A step plan as the tensors that the model and its ops take."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from common.engine.step import ScheduledSequence, StepPlan
from kernels.token_rows import DecodeRows, PrefillRows, TokenRows


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
    """Lay out the plan's sequences. Every one has at least one token, and blocks for all of its context.

    In lists, and in few arrays at the end: in a step of decode a call of NumPy or PyTorch takes some 10 us, since what
    it needs has left the core's caches.
    """
    single = [sequence for sequence in plan.sequences if len(sequence.token_ids) == 1]
    sequences = single + [sequence for sequence in plan.sequences if len(sequence.token_ids) != 1]
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sampled_rows: list[int] = []
    for sequence in sequences:
        end = sequence.start + len(sequence.token_ids)
        num_blocks = -(-end // block_size)
        assert sequence.token_ids, "a scheduled sequence must have tokens"
        assert len(sequence.block_table) >= num_blocks, (
            f"{sequence.key} needs {num_blocks} blocks, got {sequence.block_table}"
        )
        token_ids += sequence.token_ids
        positions += range(sequence.start, end)
        for block in range(sequence.start // block_size, num_blocks):
            first = sequence.block_table[block] * block_size - block * block_size
            slots += range(first + max(sequence.start, block * block_size), first + min(end, (block + 1) * block_size))
        if sequence.sampling is not None:
            sampled_rows.append(len(token_ids) - 1)
    input_ids, row_positions, slot_mapping = torch.from_numpy(
        np.array((token_ids, positions, slots), np.int64)
    ).unbind()
    return Batch(
        input_ids=input_ids,
        rows=TokenRows(
            positions=row_positions,
            slot_mapping=slot_mapping,
            num_decode_rows=len(single),
            decode=DecodeRows(*_tables_and_lens(single, block_size)) if single else None,
            prefill=_prefill_rows(sequences[len(single) :], block_size),
        ),
        sampled_rows=torch.from_numpy(np.array(sampled_rows, np.int64)),
        sampled=tuple(sequence for sequence in sequences if sequence.sampling is not None),
    )


def _prefill_rows(sequences: Sequence[ScheduledSequence], block_size: int) -> PrefillRows | None:
    if not sequences:
        return None
    lens = [len(sequence.token_ids) for sequence in sequences]
    return PrefillRows(_int32([0, *accumulate(lens)]), max(lens), *_tables_and_lens(sequences, block_size))


def _tables_and_lens(sequences: Sequence[ScheduledSequence], block_size: int) -> tuple[Tensor, Tensor]:
    """[num_seqs, max_blocks] int32, zero past each sequence's last block; and the lengths of contexts, [num_seqs]."""
    context_lens = [sequence.start + len(sequence.token_ids) for sequence in sequences]
    num_blocks = [-(-length // block_size) for length in context_lens]
    tables = np.zeros((len(sequences), max(num_blocks)), np.int32)
    for table, sequence, count in zip(tables, sequences, num_blocks, strict=True):
        table[:count] = sequence.block_table[:count]
    return torch.from_numpy(tables), _int32(context_lens)


def _int32(values: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(values, np.int32))
