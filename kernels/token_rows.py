"""Where the rows of a step belong: what the ops of every layer are told besides the hidden states."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of sequences with one token each, for `decode_attention`.

    block_tables: [num_seqs, max_blocks] int32;  context_lens: [num_seqs] int32, the new token included
    """

    block_tables: Tensor
    context_lens: Tensor


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The rows of sequences with several tokens, one after the other, for `prefill_attention`.

    cu_seqlens: [num_seqs + 1] int32, counted from the first of these rows;  max_seqlen: the longest run
    """

    cu_seqlens: Tensor
    max_seqlen: int
    block_tables: Tensor
    context_lens: Tensor


@dataclass(frozen=True, slots=True)
class TokenRows:
    """One row a token: first the decode rows, then the prefill rows.

    positions, slot_mapping:  [num_tokens] int64; slot = block_id * block_size + offset
    num_decode_rows:          rows of `decode`; the rest are those of `prefill`
    decode, prefill:          None when there are no such rows
    """

    positions: Tensor
    slot_mapping: Tensor
    num_decode_rows: int
    decode: DecodeRows | None
    prefill: PrefillRows | None
