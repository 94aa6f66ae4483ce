"""Drives a runner by hand-made plans: no scheduler, no service."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from common.engine.kv_cache import KVCache, PagedCache, kv_layout
from common.engine.model_config import read_model_config
from common.engine.runner import ModelRunner, load_model
from common.engine.step import ScheduledSequence, StepPlan, StepResult
from common.ids import BlockId, RequestId, SequenceKey
from common.model_files import find_model
from common.sampling import SamplingParams
from kernels.cpu.cores import private_cores

GREEDY = SamplingParams(max_tokens=1000, temperature=0.0)


def load(
    model: str | Path,
    *,
    dtype: str = "float32",
    num_blocks: int = 64,
    block_size: int = 16,
    kernels: str = "auto",
    quantization: str = "none",
) -> ModelRunner:
    files = find_model(str(model))
    config = read_model_config(files)
    layout = kv_layout(config, dtype, block_size, files.model_hash)
    max_len = min(config.max_context, num_blocks * block_size)
    loaded = load_model(files, config, layout, max_len, private_cores(2), kernels, quantization)
    return ModelRunner(loaded, KVCache(layout, num_blocks))


@dataclass
class Progress:
    """What was given to the runner of one sequence, and what came back. num_computed: tokens with KV."""

    prompt: list[int]
    block_table: list[BlockId]
    output: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def pending(self) -> list[int]:
        return (self.prompt + self.output)[self.num_computed :]


class Executor(Protocol):
    """A runner, or several that act as one."""

    @property
    def kv_cache(self) -> PagedCache: ...

    def execute(self, plan: StepPlan) -> StepResult: ...


class Driver:
    """Sequences with blocks of their own, in an order that is not the identity."""

    def __init__(self, runner: Executor) -> None:
        self._runner = runner
        self._free = [BlockId(index) for index in reversed(range(runner.kv_cache.num_blocks))]
        self.sequences: dict[str, Progress] = {}

    def start(self, name: str, prompt: Sequence[int], max_len: int) -> None:
        """Reserve blocks for max_len tokens, taken from both ends of the free ones in turn."""
        count = -(-max_len // self._runner.kv_cache.layout.block_size)
        table = [self._free.pop(0 if index % 2 else -1) for index in range(count)]
        self.sequences[name] = Progress(list(prompt), table)

    def step(self, num_tokens: Mapping[str, int]) -> StepResult:
        """Compute so many pending tokens of each sequence; one that has none left after it gets a new one."""
        result = self._runner.execute(StepPlan(tuple(self._schedule(name, num) for name, num in num_tokens.items())))
        assert not result.failed
        for name, num in num_tokens.items():
            sequence = self.sequences[name]
            sequence.num_computed += num
            if (key := _key(name)) in result.sampled:
                sequence.output.append(result.sampled[key])
        return result

    def prefill(self, name: str, chunk: int = 10**9) -> None:
        """Compute everything that is pending, in chunks."""
        while pending := self.sequences[name].pending:
            self.step({name: min(chunk, len(pending))})
            if len(pending) <= chunk:
                return

    def decode(self, names: Sequence[str], num_steps: int) -> None:
        for _ in range(num_steps):
            self.step(dict.fromkeys(names, 1))

    def _schedule(self, name: str, num_tokens: int) -> ScheduledSequence:
        sequence = self.sequences[name]
        is_last = num_tokens == len(sequence.pending)
        return ScheduledSequence(
            key=_key(name),
            token_ids=sequence.pending[:num_tokens],
            start=sequence.num_computed,
            block_table=sequence.block_table,
            sampling=GREEDY if is_last else None,
            prompt_token_ids=sequence.prompt,
            output_token_ids=sequence.output,
            seal=sequence.block_table[:1] if is_last else (),
        )


def _key(name: str) -> SequenceKey:
    return SequenceKey(RequestId(name), 0)


def greedy(runner: Executor, prompts: Sequence[Sequence[int]], num_tokens: int, chunk: int = 10**9) -> list[list[int]]:
    """Prefill each prompt on its own, then decode all of them together."""
    driver = Driver(runner)
    names = [str(index) for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        driver.start(name, prompt, len(prompt) + num_tokens)
        driver.prefill(name, chunk)
    driver.decode(names, num_tokens - 1)
    return [driver.sequences[name].output for name in names]
