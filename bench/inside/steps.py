"""What whole steps cost, by batch, by context and by length of a prompt: the real model, no scheduler, no server."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.inside.curves import Curve, Point
from bench.inside.plans import decode_plan, num_blocks_for, prompt_plan, prompt_tokens
from common.bench_inside_config import StepOptions
from common.engine.loading import ModelPlan
from common.engine.step import StepPlan
from common.engine.worker_main import Engine

_NUM_WARMUPS = 2
_FEWEST_REPEATS = 3


@dataclass(frozen=True, slots=True)
class CurvePlan:
    """sizes: growing;  plan_of: the step of a size;  num_blocks: of a cache for the largest."""

    name: str
    title: str
    size_name: str
    sizes: Sequence[int]
    plan_of: Callable[[int], StepPlan]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """ops: the native ops' instruction level;  num_cores: of all ranks;  left_out: sizes too long for the model."""

    model: str
    ops: str
    dtype: str
    num_cores: int
    num_ranks: int
    left_out: Sequence[int]
    curves: Sequence[Curve]


def plan_curves(model: ModelPlan, options: StepOptions) -> list[CurvePlan]:
    """Those that were asked for, as far as the model's context goes."""
    size = model.layout.block_size
    most = model.files.max_context
    batches = _sizes(options.batch_sizes)
    contexts = [num for num in _sizes(options.contexts) if num <= most]
    lens = [num for num in _sizes(options.prompt_lens) if num <= most]
    batch, context = options.context_batch, min(options.batch_context, most)
    vocab_size = model.config.vocab_size
    planned = {
        "batch": CurvePlan(
            name="batch",
            title=f"Decode step, context {context}",
            size_name="sequences",
            sizes=batches,
            plan_of=lambda num: decode_plan(num, context, size),
            num_blocks=num_blocks_for(max(batches), context, size),
        ),
        "context": CurvePlan(
            name="context",
            title=f"Decode step, {batch} sequences",
            size_name="tokens of context",
            sizes=contexts,
            plan_of=lambda num: decode_plan(batch, num, size),
            num_blocks=num_blocks_for(batch, max(contexts, default=0), size),
        ),
        "prompt": CurvePlan(
            name="prompt",
            title="Prompt in one step",
            size_name="tokens",
            sizes=lens,
            plan_of=lambda num: prompt_plan(prompt_tokens(num, vocab_size), 0, size),
            num_blocks=num_blocks_for(1, max(lens, default=0), size),
        ),
    }
    return [planned[name] for name in dict.fromkeys(options.curves)]


def left_out(model: ModelPlan, options: StepOptions) -> list[int]:
    """Lengths that the model does not take."""
    asked = _sizes((*options.contexts, *options.prompt_lens))
    return [num for num in asked if num > model.files.max_context]


def measure_curves(
    engine: Engine, planned: Sequence[CurvePlan], repeats: int, point_time_s: float, tick: Callable[[], None]
) -> list[Curve]:
    """tick: called after each point."""
    curves: list[Curve] = []
    for curve in planned:
        points: list[Point] = []
        for size in curve.sizes:
            plan = curve.plan_of(size)
            times_s = _times_s(engine, plan, repeats, point_time_s)
            points.append(Point(size, len(plan.sequences), plan.num_tokens, plan.num_pairs, times_s))
            tick()
        curves.append(Curve(curve.name, curve.title, curve.size_name, points))
    return curves


def _times_s(engine: Engine, plan: StepPlan, repeats: int, point_time_s: float) -> list[float]:
    """From the plan to the sampled tokens, as the worker's loop waits for it."""
    end_s = time.perf_counter() + point_time_s
    for _ in range(_NUM_WARMUPS):
        engine.runner.execute(plan)
    times_s: list[float] = []
    while len(times_s) < min(repeats, _FEWEST_REPEATS) or (len(times_s) < repeats and time.perf_counter() < end_s):
        started_s = time.perf_counter()
        engine.runner.execute(plan)
        times_s.append(time.perf_counter() - started_s)
    engine.runner.rest()
    return times_s


def _sizes(texts: Sequence[str]) -> list[int]:
    return sorted({int(text) for text in texts})
