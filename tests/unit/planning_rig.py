"""Deployments that are easy to reckon with: round costs, no noise; and the files that costs are read from."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.planning.costs import DECODE_FEATURES, HANDOFF_FEATURES, PROMPT_FEATURES, Fit, StepCosts
from bench.planning.deployment import WorkerModel
from bench.workload import Load, Plan, RequestSpec, plan_run

LINK_S = 0.001
PROMPT = (0.02, 0.001, 1e-6)
"""Of steps.json: seconds a step, a token, a pair of tokens."""
DECODE = (0.01, 0.001, 0.002, 1e-6)
"""Seconds a step, a sequence, a sequence beyond four, a token of context."""
HANDOFF = (0.001, 1e-5)
"""Seconds a handoff, a token."""


def step_costs(prompt: Sequence[float] = (0, 0.001, 0), decode: Sequence[float] = (0.01, 0, 0, 0)) -> StepCosts:
    """By default a millisecond a token of a prompt, and ten a decode step."""
    return StepCosts(Fit(PROMPT_FEATURES, tuple(prompt), ()), Fit(DECODE_FEATURES, tuple(decode), ()))


def worker_model(**changes: Any) -> WorkerModel:
    """Handoffs take nothing, and steps of prompts are not cut."""
    model = WorkerModel(
        steps=step_costs(),
        shared_steps=None,
        handoff=Fit(HANDOFF_FEATURES, (0, 0), ()),
        link_s=LINK_S,
        vocab_size=1000,
        block_size=4,
        num_blocks=1000,
        max_batch_prefill_tokens=4096,
        max_step_s=60.0,
        max_num_seqs=64,
        itl_target_s=0.0,
        kv_lease_s=30.0,
    )
    return replace(model, **changes)


def plan_of(specs: list[RequestSpec], load: Load) -> Plan:
    return plan_run(specs, load, seed=0, vocab_size=1000, salt=0)


def write_steps(path: Path) -> Path:
    """Results of `baton bench steps`, whose times are exactly those of PROMPT and DECODE."""
    prompts = [_point(1, num, num * (num + 1) // 2) for num in (8, 64, 256)]
    batches = [_point(num, num, num * 128) for num in (1, 2, 4, 8, 16)]
    contexts = [_point(2, 2, 2 * num) for num in (64, 1024)]
    curves = {"prompt": prompts, "batch": batches, "context": contexts}
    path.write_text(json.dumps({"curves": [{"name": name, "points": points} for name, points in curves.items()]}))
    return path


def _point(num_sequences: int, num_tokens: int, num_pairs: int) -> dict[str, object]:
    if num_tokens > num_sequences:
        time_s = _sum(PROMPT, (1, num_tokens, num_pairs))
    else:
        time_s = _sum(DECODE, (1, num_sequences, max(0, num_sequences - 4), num_pairs))
    times_s = [time_s, time_s, 9.0, 0.0, time_s]
    return {"num_sequences": num_sequences, "num_tokens": num_tokens, "num_pairs": num_pairs, "times_s": times_s}


def write_handoffs(path: Path) -> Path:
    """Results of `baton bench handoff`, whose times over TCP are exactly those of HANDOFF."""
    handoffs = [
        {"transport": transport, "num_tokens": num, "times_s": [factor * _sum(HANDOFF, (1, num))]}
        for transport, factor in (("tcp", 1), ("shm", 0.5))
        for num in (128, 1024)
    ]
    path.write_text(json.dumps({"handoffs": handoffs}))
    return path


def _sum(coefficients: Sequence[float], features: Sequence[float]) -> float:
    return sum(each * feature for each, feature in zip(coefficients, features, strict=True))
