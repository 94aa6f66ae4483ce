"""How well a model predicts a text, through the very steps that prompts take: what quantised weights cost.

A step of the runner computes logits only where a token is sampled. Here the model is asked for those of every row: the
same computation with more rows in its head, of which nothing in the serving path knows.
"""

# pyright: basic

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.inside.engine import load_engine, quantised
from bench.inside.plans import num_blocks_for, prompt_plan
from bench.inside.windows import Comparison, Scores, Window, compare, cut_windows, join
from common.config import DecodeCommand
from common.engine.batch import build_batch
from common.engine.loading import ModelPlan
from common.engine.worker_main import Engine

_STEP_TOKENS = 512
"""Logits of so many rows take 100 MB for a vocabulary of 50,000."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """One quantization's. comparison: with the first one;  time_s: of all steps."""

    quantization: str
    ops: str
    perplexity: float
    comparison: Comparison
    time_s: float


@dataclass(frozen=True, slots=True)
class PerplexityReport:
    """num_scored: tokens of the text but the first;  num_computed: with those that windows have in common."""

    model: str
    dtype: str
    num_scored: int
    num_computed: int
    window: int
    stride: int
    results: Sequence[Perplexity]


def measure_perplexities(
    plan: ModelPlan,
    command: DecodeCommand,
    quantizations: Sequence[str],
    token_ids: Sequence[int],
    window: int,
    stride: int,
    tick: Callable[[], None],
) -> PerplexityReport:
    """Loads the model once for each quantization. tick: called after each window."""
    windows = cut_windows(len(token_ids), window, stride)
    results: list[Perplexity] = []
    base: Scores | None = None
    for quantization in quantizations:
        num_blocks = num_blocks_for(1, window, plan.layout.block_size)
        with load_engine(plan, quantised(command, quantization), num_blocks) as engine:
            started_s = time.perf_counter()
            scores = score(engine, token_ids, windows, tick)
            time_s = time.perf_counter() - started_s
            ops = engine.own.runner.ops.name
        del engine  # the next one's weights come in its place
        base = base or scores
        results.append(Perplexity(quantization, ops, scores.perplexity, compare(scores, base), time_s))
    num_computed = sum(each.end - each.start for each in windows)
    return PerplexityReport(
        plan.files.name, plan.layout.dtype, len(token_ids) - 1, num_computed, window, stride, results
    )


@torch.inference_mode()
def score(engine: Engine, token_ids: Sequence[int], windows: Sequence[Window], tick: Callable[[], None]) -> Scores:
    """Overwrites the cache's first blocks."""
    parts: list[Scores] = []
    for window in windows:
        parts.extend(_score_window(engine, token_ids, window))
        tick()
    engine.runner.rest()
    return join(parts)


def _score_window(engine: Engine, token_ids: Sequence[int], window: Window) -> list[Scores]:
    """In steps; the logits of a row predict the token after it, so the last row's are of no use."""
    parts: list[Scores] = []
    for start in range(window.start, window.end - 1, _STEP_TOKENS):
        end = min(start + _STEP_TOKENS, window.end - 1)
        first = min(max(start, window.first_scored - 1), end)
        logits = _logits(engine, token_ids[start:end], start - window.start, first - start)
        if first < end:
            parts.append(_scores(logits, torch.tensor(token_ids[first + 1 : end + 1])))
    return parts


def _logits(engine: Engine, token_ids: Sequence[int], start: int, first_row: int) -> Tensor:
    """Of the step's rows from first_row on, [num_rows, vocab_size] fp32. start: tokens of the window before it."""
    runner, block_size = engine.own.runner, engine.layout.block_size
    batch = build_batch(prompt_plan(token_ids, start, block_size), block_size)
    rows = torch.arange(first_row, len(token_ids))
    return runner.model.forward(replace(batch, sampled_rows=rows), runner.kv_cache)


def _scores(logits: Tensor, token_ids: Tensor) -> Scores:
    """logits: [num_tokens, vocab_size];  token_ids: what came in each place."""
    taken = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    surprises = logits.logsumexp(1) - taken
    return Scores(surprises.double().numpy(), logits.argmax(1).numpy())
