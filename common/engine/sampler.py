"""From logits and each sequence's sampling parameters to its next token."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from common.engine.step import ScheduledSequence
from common.sampling import SamplingParams
from kernels.penalties import add_bias, mask_tokens, penalize
from kernels.sample import Draws


class SamplingOps(Protocol):
    """As kernels/argmax.py and kernels/sample.py have them, or as fast as a device does."""

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]: ...

    def sample(self, logits: Tensor, draws: Draws) -> Tensor: ...


class Sampler:
    """Chooses tokens for all sequences of a step at once. Holds no state: noise is a function of seed and position.

    The order is logit_bias, penalties, min_tokens, temperature, then top_k, top_p and min_p.
    """

    def __init__(self, vocab_size: int, ops: SamplingOps) -> None:
        self._vocab_size = vocab_size
        self._ops = ops

    def sample(self, logits: Tensor, sequences: Sequence[ScheduledSequence]) -> tuple[list[int], dict[int, str]]:
        """Choose the next token of each sequence.

        logits:     [len(sequences), vocab_size], of each sequence's last computed token; not changed
        sequences:  all of them with sampling parameters
        Returns the token of each row, -1 where it failed, and why by row. A row fails if its logits
        have no finite maximum; the others are not affected.
        """
        assert logits.shape == (len(sequences), self._vocab_size), f"logits of {len(sequences)}: {tuple(logits.shape)}"
        if not sequences:
            return [], {}
        params = [_sampling_of(sequence) for sequence in sequences]
        if all(_is_argmax(one, sequence) for one, sequence in zip(params, sequences, strict=True)):
            maxima, token_ids = self._ops.argmax(logits)
            return _report(token_ids, maxima)
        logits = logits.to(torch.float32, copy=True)
        _edit(logits, params, sequences)
        maxima = logits.amax(1)
        # Rows that fail are drawn too, from harmless logits, and reported as failed.
        logits.masked_fill_(~maxima.isfinite().unsqueeze(1), 0.0)
        return _report(self._ops.sample(logits, _draws(params, sequences, logits.device)), maxima)


def _sampling_of(sequence: ScheduledSequence) -> SamplingParams:
    assert sequence.sampling is not None, f"{sequence.key} has nothing to sample"
    return sequence.sampling


def _is_argmax(params: SamplingParams, sequence: ScheduledSequence) -> bool:
    """The token is simply the one with the largest logit."""
    is_edited = params.has_penalties or params.logit_bias or _masks_endings(params, sequence)
    return params.is_greedy and not is_edited


def _masks_endings(params: SamplingParams, sequence: ScheduledSequence) -> bool:
    return len(sequence.output_token_ids) < params.min_tokens


def _report(token_ids: Tensor, maxima: Tensor) -> tuple[list[int], dict[int, str]]:
    failed = {
        row: f"logits must have a finite maximum, got {most}"
        for row, most in enumerate(maxima.tolist())
        if not math.isfinite(most)
    }
    return [-1 if row in failed else token_id for row, token_id in enumerate(token_ids.tolist())], failed


def _draws(params: Sequence[SamplingParams], sequences: Sequence[ScheduledSequence], device: torch.device) -> Draws:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Draws(
        temperature=column([one.temperature for one in params], torch.float32),
        top_k=column([one.top_k for one in params], torch.int64),
        top_p=column([one.top_p for one in params], torch.float32),
        min_p=column([one.min_p for one in params], torch.float32),
        seed=column([_as_signed(one.seed) for one in params], torch.int64),
        position=column([sequence.start + len(sequence.token_ids) for sequence in sequences], torch.int64),
    )


def _as_signed(seed: int) -> int:
    """The same 64 bits as torch's int64 holds them."""
    return seed - 2**64 if seed >= 2**63 else seed


def _edit(logits: Tensor, params: Sequence[SamplingParams], sequences: Sequence[ScheduledSequence]) -> None:
    """Apply in place what comes before temperature."""
    _edit_biases(logits, params)
    _edit_penalties(logits, params, sequences)
    masked = [
        (row, token_id)
        for row, (one, sequence) in enumerate(zip(params, sequences, strict=True))
        if _masks_endings(one, sequence)
        for token_id in one.ending_token_ids
    ]
    if masked:
        rows, token_ids = torch.tensor(masked, device=logits.device).unbind(1)
        mask_tokens(logits, rows, token_ids)


def _edit_biases(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    biases = [(row, token_id, bias) for row, one in enumerate(params) for token_id, bias in one.logit_bias]
    if biases:
        rows, token_ids, values = zip(*biases, strict=True)
        device = logits.device
        add_bias(
            logits,
            torch.tensor(rows, device=device),
            torch.tensor(token_ids, device=device),
            torch.tensor(values, dtype=torch.float32, device=device),
        )


def _edit_penalties(logits: Tensor, params: Sequence[SamplingParams], sequences: Sequence[ScheduledSequence]) -> None:
    rows = [row for row, one in enumerate(params) if one.has_penalties]
    if not rows:
        return
    index = torch.tensor(rows, device=logits.device)
    penalized = logits[index]
    output_counts = _count_tokens([sequences[row].output_token_ids for row in rows], penalized)
    prompt_counts = _count_tokens([sequences[row].prompt_token_ids for row in rows], penalized)
    is_seen = output_counts + prompt_counts > 0
    factors = [
        (one.repetition_penalty, one.presence_penalty, one.frequency_penalty) for one in (params[row] for row in rows)
    ]
    repetition, presence, frequency = torch.tensor(factors, dtype=torch.float32, device=logits.device).unbind(1)
    penalize(penalized, is_seen, output_counts, repetition, presence, frequency)
    logits[index] = penalized


def _count_tokens(texts: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """Occurrences of each token in each text, in the shape and dtype of like: [len(texts), vocab_size]."""
    counts = torch.zeros_like(like)
    for row, token_ids in enumerate(texts):
        index = torch.tensor(list(token_ids), dtype=torch.int64, device=like.device)
        counts[row].scatter_add_(0, index, torch.ones(len(token_ids), dtype=like.dtype, device=like.device))
    return counts
