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
from bench.inside.engine import Engine
from bench.inside.machine import MachineLimits
from bench.inside.plans import prompt_plan, prompt_tokens
from bench.inside.work import StepShape, Work, decode_shape, prompt_shape, work_of_phases
from common.engine.batch import build_batch
from common.engine.runner import resolve_quantization
from common.engine.step import StepPlan, StepResult
from common.errors import ConfigError
from common.service import Send
from common.wire import Envelope, Tokens, decode, encode
from gateway.detokenizer import OutputText
from gateway.tokenizer import Tokenizer
from kernels.cpu.library import PHASES
from kernels.cpu.ops import CpuOps

NUM_WARMUPS = 3

AROUND = "around the blocks"
"""Of the model: embeddings, and what calling the blocks costs: see docs/performance.md."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of every step. times_s: of each step;  work: None where there is nothing to compare with a limit.

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
    limits: MachineLimits
    breakdowns: Sequence[Breakdown]


class _Steps:
    """Times of phases, step by step. Mutable: what was measured, and when the last phase ended."""

    def __init__(self, engine: Engine) -> None:
        """Raises: ConfigError when the ops do not tell their phases."""
        if not isinstance(engine.ops, CpuOps):
            raise ConfigError(f"phases: wanted native ops, got {engine.ops.name}")
        self.times_s: dict[str, list[float]] = {}
        self._native_s = engine.ops.time_phases()
        self._before = self._native_s()
        self._last_s = time.perf_counter()

    def begin(self) -> None:
        self._last_s = time.perf_counter()

    def end(self, name: str) -> float:
        """The phase that began with the end of the last one; returns its time."""
        now_s = time.perf_counter()
        took_s, self._last_s = now_s - self._last_s, now_s
        self._add(name, took_s)
        return took_s

    def end_model(self) -> None:
        """The same for the model, by its native phases and the rest."""
        now_s = time.perf_counter()
        rest_s, self._last_s = now_s - self._last_s, now_s
        after = self._native_s()
        for name in PHASES:
            took_s = after[name] - self._before[name]
            self._add(name, took_s)
            rest_s -= took_s
        self._before = after
        self._add(AROUND, rest_s)

    def _add(self, name: str, took_s: float) -> None:
        self.times_s.setdefault(name, []).append(took_s)


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
    layout, config = engine.source.layout, engine.source.config
    num_steps = NUM_WARMUPS + repeats
    worker = start_worker(layout, engine.cache.num_blocks, config.vocab_size, batch, context, num_steps)
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
    engine.ops.rest()
    title = f"Decode step, {batch} sequences, context {context}"
    return _breakdown(engine, title, steps, decode_shape([context] * batch), limits, quantization)


@torch.inference_mode()
def measure_prompt(
    engine: Engine, limits: MachineLimits, num_tokens: int, repeats: int, quantization: str
) -> Breakdown:
    """Whole prompts in a step each, with the checksums of their blocks."""
    layout = engine.source.layout
    plan = prompt_plan(prompt_tokens(num_tokens, engine.source.config.vocab_size), 0, layout.block_size)
    steps = _Steps(engine)
    for _ in range(NUM_WARMUPS + repeats):
        steps.begin()
        _compute(engine, plan, steps)
        engine.cache.checksums(plan.sequences[0].block_table)
        steps.end("checksums")
    engine.ops.rest()
    title = f"Prompt of {num_tokens} tokens in one step"
    return _breakdown(engine, title, steps, prompt_shape(num_tokens), limits, quantization)


def _compute(engine: Engine, plan: StepPlan, steps: _Steps) -> StepResult:
    """What the runner does, phase by phase."""
    batch = build_batch(plan, engine.cache.layout.block_size)
    steps.end("build batch")
    logits = engine.model.forward(batch, engine.cache)
    steps.end_model()
    token_ids, _ = engine.sampler.sample(logits, batch.sampled)
    sampled = {sequence.key: token_id for sequence, token_id in zip(batch.sampled, token_ids, strict=True)}
    steps.end("sampling")
    return StepResult(sampled=sampled)


def _breakdown(
    engine: Engine, title: str, steps: _Steps, shape: StepShape, limits: MachineLimits, quantization: str
) -> Breakdown:
    source = engine.source
    resolved = resolve_quantization(quantization, source.files)
    work = work_of_phases(source.config, source.layout.dtype, resolved, shape)
    measured = {name: times_s[NUM_WARMUPS:] for name, times_s in steps.times_s.items()}
    # One rank alone has nothing to add up, for instance.
    return Breakdown(title, [_phase(name, times_s, work, limits) for name, times_s in measured.items() if any(times_s)])


def _phase(name: str, times_s: Sequence[float], work: Mapping[str, Work], limits: MachineLimits) -> Phase:
    found = work.get(name)
    return Phase(name, times_s, found, limits.shortest_s(found.num_bytes, found.num_flops) if found else 0.0)
