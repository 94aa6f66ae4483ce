"""A long text in windows that a model takes, so that each token is scored once, with enough text before it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens [start, end) of the text, of which [first_scored, end) are scored."""

    start: int
    end: int
    first_scored: int


def cut_windows(num_tokens: int, length: int, stride: int) -> list[Window]:
    """Windows of `length`, each `stride` after the one before. The text's first token has nothing that predicts it."""
    assert 0 < stride < length, f"windows of {length} tokens must overlap, got a stride of {stride}"
    windows: list[Window] = []
    scored = 1
    for start in range(0, num_tokens, stride):
        end = min(start + length, num_tokens)
        if end > scored:
            windows.append(Window(start, end, scored))
            scored = end
    return windows


@dataclass(frozen=True, slots=True)
class Scores:
    """Of every scored token, in order. surprises: negative log probabilities;  guesses: the likeliest tokens."""

    surprises: FloatArray
    guesses: npt.NDArray[np.int64]

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.surprises.mean()))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One model's scores beside another's of the same text.

    ratio:         of the perplexities
    ratio_error:   its standard error, from the differences token by token: much less than that of either perplexity
    same_guesses:  share of tokens for which both think the same token the likeliest
    """

    ratio: float
    ratio_error: float
    same_guesses: float


def compare(scores: Scores, base: Scores) -> Comparison:
    differences = scores.surprises - base.surprises
    ratio = float(np.exp(differences.mean()))
    error = float(differences.std(ddof=1) / np.sqrt(len(differences))) if len(differences) > 1 else float("nan")
    return Comparison(ratio, ratio * error, float((scores.guesses == base.guesses).mean()))


def join(parts: Sequence[Scores]) -> Scores:
    return Scores(np.concatenate([part.surprises for part in parts]), np.concatenate([part.guesses for part in parts]))
