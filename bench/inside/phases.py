"""Where a step's time goes, beside what the machine could do at most.

The steps are taken apart here: what a worker's loop and its runner call one after the other is called here with a look
at the clock in between, and the native blocks tell how long each of their phases took (`CpuOps.time_phases`).
"""

# pyright: basic

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from bench.inside.decode_worker import GATEWAY, WORKER, key_of, start_worker
from bench.inside.machine import MachineLimits
from bench.inside.plans import prompt_plan, prompt_tokens
from bench.inside.work import StepShape, Work, decode_shape, prompt_shape, work_of_phases
from common.engine.batch import build_batch
from common.engine.group_runner import GroupRunner
from common.engine.runner import resolve_quantization
from common.engine.step import StepPlan, StepResult
from common.engine.worker_main import Engine
from common.errors import ConfigError
from common.service import Send
from common.wire import Envelope, Tokens, decode, encode
from gateway.detokenizer import OutputText
from gateway.tokenizer import Tokenizer
from kernels.cpu.library import PHASES
from kernels.cpu.ops import CpuOps

NUM_WARMUPS = 3

AROUND = "around the blocks"
"""Of the model: what calling the blocks costs: see docs/performance.md."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of every step, at rank 0. times_s: of each step

    work: of all ranks together, as the limits are; None where there is nothing to compare with a limit

    shortest_s: that the machine would need for the work, at its limits; 0 without work
    """

    name: str
    times_s: Sequence[float]
    work: Work | None
    shortest_s: float

    @property
    def median_s(self) -> float:
        return median(self.times_s)

    @property
    def share_of_limit(self) -> float:
        return self.shortest_s / self.median_s if self.median_s else 0.0


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Steps of one kind, by phase, in the order in which they come."""

    title: str
    phases: Sequence[Phase]

    @property
    def median_s(self) -> float:
        """Of whole steps."""
        return median(map(sum, zip(*(phase.times_s for phase in self.phases), strict=True)))


@dataclass(frozen=True, slots=True)
class PhaseReport:
    model: str
    ops: str
    num_ranks: int
    limits: MachineLimits
    breakdowns: Sequence[Breakdown]


class _Steps:
    """Times of phases, step by step. Mutable: what was measured, and when the last phase ended.

    steps_s: of each step, in the order in which its phases came
    """

    def __init__(self, engine: Engine) -> None:
        """Raises: ConfigError when the ops do not tell their phases."""
        ops = engine.own.runner.ops
        if not isinstance(ops, CpuOps):
            raise ConfigError(f"phases: wanted native ops, got {ops.name}")
        self.steps_s: list[dict[str, float]] = []
        self._native_s = ops.time_phases()
        self._before = self._native_s()
        self._last_s = time.perf_counter()

    def begin(self) -> None:
        self.steps_s.append({})
        self._last_s = time.perf_counter()

    def end(self, name: str) -> None:
        """The phase that began with the end of the last one."""
        now_s = time.perf_counter()
        took_s, self._last_s = now_s - self._last_s, now_s
        self._add(name, took_s)

    def end_native(self, name: str) -> None:
        """The same where there are native phases: each of them, and the rest."""
        after = self._native_s()
        self.end(name)
        for phase in PHASES:
            took_s = after[phase] - self._before[phase]
            self._add(phase, took_s)
            self._add(name, -took_s)
        self._before = after

    def _add(self, name: str, took_s: float) -> None:
        times_s = self.steps_s[-1]
        times_s[name] = times_s.get(name, 0.0) + took_s


@torch.inference_mode()
def measure_decode(
    engine: Engine,
    tokenizer: Tokenizer,
    limits: MachineLimits,
    batch: int,
    context: int,
    repeats: int,
    quantization: str,
) -> Breakdown:
    """Steps of a worker's service, to the text that a gateway makes of their tokens."""
    num_steps = NUM_WARMUPS + repeats
    worker = start_worker(engine.layout, engine.num_blocks, engine.plan.config.vocab_size, batch, context, num_steps)
    token_bytes = tokenizer.token_bytes(skip_special_tokens=True)
    texts = {
        key_of(number).request_id: OutputText(token_bytes, include_stop=False, min_tokens=0) for number in range(batch)
    }
    steps = _Steps(engine)
    for _ in range(num_steps):
        steps.begin()
        plan, _ = worker.plan(0.0)
        assert plan is not None, "the sequences run"
        steps.end("schedule")
        result = _compute(engine, plan, steps)
        effects = worker.complete(plan, result, 0.0)
        steps.end("take in tokens")
        (message,) = (effect.message for effect in effects if isinstance(effect, Send))
        received = decode(encode(Envelope(WORKER, GATEWAY, 1, message))).message
        assert isinstance(received, Tokens), f"a step sends tokens, got {received}"
        steps.end("bus: encode, decode")
        for entry in received.entries:
            texts[entry.request_id].add(entry.token_ids, None)
        steps.end("detokenize")
    engine.runner.rest()
    title = f"Decode step, {batch} sequences, context {context}"
    return _breakdown(engine, title, steps, decode_shape([context] * batch), limits, quantization)


@torch.inference_mode()
def measure_prompt(
    engine: Engine, limits: MachineLimits, num_tokens: int, repeats: int, quantization: str
) -> Breakdown:
    """Whole prompts in a step each, with the checksums of their blocks."""
    plan = prompt_plan(prompt_tokens(num_tokens, engine.plan.config.vocab_size), 0, engine.layout.block_size)
    steps = _Steps(engine)
    for _ in range(NUM_WARMUPS + repeats):
        steps.begin()
        _compute(engine, plan, steps)
        engine.own.cache.checksums(plan.sequences[0].block_table)
        steps.end("checksums")
    engine.runner.rest()
    title = f"Prompt of {num_tokens} tokens in one step"
    return _breakdown(engine, title, steps, prompt_shape(num_tokens), limits, quantization)


def _compute(engine: Engine, plan: StepPlan, steps: _Steps) -> StepResult:
    """What the runner does, phase by phase."""
    runner, cache = engine.own.runner, engine.own.cache
    after_head = AROUND
    if isinstance(engine.runner, GroupRunner):
        engine.runner.announce(plan)
        steps.end("announce")
        after_head = "gather logits"
    batch = build_batch(plan, engine.layout.block_size)
    steps.end("build batch")
    x = runner.model.embed(batch)
    steps.end("embedding")
    x, residual = runner.model.decode(x, batch, cache)
    steps.end_native(AROUND)
    logits = runner.model.logits(x, residual, batch)
    steps.end_native(after_head)
    token_ids, _ = runner.sampler.sample(logits, batch.sampled)
    sampled = {sequence.key: token_id for sequence, token_id in zip(batch.sampled, token_ids, strict=True)}
    steps.end("sampling")
    return StepResult(sampled=sampled)


def _breakdown(
    engine: Engine, title: str, steps: _Steps, shape: StepShape, limits: MachineLimits, quantization: str
) -> Breakdown:
    plan = engine.plan
    work = work_of_phases(plan.config, plan.layout.dtype, resolve_quantization(quantization, plan.files), shape)
    measured = {name: [times_s[name] for times_s in steps.steps_s[NUM_WARMUPS:]] for name in steps.steps_s[0]}
    # One rank alone has nothing to add up, for instance.
    return Breakdown(title, [_phase(name, times_s, work, limits) for name, times_s in measured.items() if any(times_s)])


def _phase(name: str, times_s: Sequence[float], work: Mapping[str, Work], limits: MachineLimits) -> Phase:
    found = work.get(name)
    return Phase(name, times_s, found, limits.shortest_s(found.num_bytes, found.num_flops) if found else 0.0)
