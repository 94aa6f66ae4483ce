"""How many blocks of KV a GPU has room for beside weights and steps."""

from dataclasses import dataclass

import torch

from common.config import DecodeCommand, PrefillCommand, WorkerCommand
from common.engine.device_cache import DeviceKVCache
from common.engine.devices import Placement
from common.engine.runner import LoadedModel, ModelRunner
from common.engine.step import ScheduledSequence, StepPlan
from common.errors import ConfigError
from common.ids import BlockId, RequestId, SequenceKey
from common.kv_layout import KVLayout
from common.sampling import SamplingParams

CONTEXT_BYTES = 2**30
"""What a process takes besides PyTorch's own memory, CUDA's context and libraries. An allowance; not measured."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a GPU, in bytes. weights: of ours;  step: what the largest step needs beside them;  free: of all of it."""

    total: int
    free: int
    weights: int
    step: int

    def num_blocks(self, block_bytes: int, utilization: float, num_sharing: int) -> int:
        """What fits into our part. The step counts twice: graphs have memory of their own.

        Raises: ConfigError when there is no room for two blocks.
        """
        budget = int(self.total * utilization / num_sharing)
        room = min(budget - self.weights - 2 * self.step - CONTEXT_BYTES, self.free - self.step)
        if room < 2 * block_bytes:
            named = {"weights": self.weights, "steps": 2 * self.step, "CUDA": CONTEXT_BYTES, "free": self.free}
            sizes = ", ".join(f"{name} {num_bytes / 1e9:.1f} GB" for name, num_bytes in named.items())
            raise ConfigError(
                f"gpu_memory_utilization {utilization:g} gives each of {num_sharing} processes on a GPU of"
                f" {self.total / 1e9:.1f} GB {budget / 1e9:.1f} GB, which leave no room for a KV cache: {sizes}"
            )
        return room // block_bytes


def largest_step(command: WorkerCommand, max_model_len: int, block_size: int) -> StepPlan:
    """As many prompt tokens and sequences as the worker takes at once. All lie in the same blocks, from 0 on."""
    num_prompt = 0 if isinstance(command, DecodeCommand) else command.prefill.max_batch_prefill_tokens
    num_single = 0 if isinstance(command, PrefillCommand) else command.decode.max_num_seqs
    lens = [min(max_model_len, num_prompt - start) for start in range(0, num_prompt, max_model_len)]
    return StepPlan(tuple(_nobody(length, block_size) for length in [1] * num_single + lens))


def _nobody(num_tokens: int, block_size: int) -> ScheduledSequence:
    return ScheduledSequence(
        key=SequenceKey(RequestId(""), 0),
        token_ids=[0] * num_tokens,
        start=0,
        block_table=[BlockId(block) for block in range(-(-num_tokens // block_size))],
        sampling=SamplingParams(max_tokens=1, temperature=1.0, top_p=0.5),
        prompt_token_ids=[],
        output_token_ids=[],
    )


def measure_usage(loaded: LoadedModel, layout: KVLayout, step: StepPlan, placement: Placement, rank: int) -> Usage:
    """Run the step, at all ranks of a group at once, over a cache that is then dropped."""
    device = placement.device
    weights = torch.cuda.memory_allocated(device)
    num_blocks = max(len(sequence.block_table) for sequence in step.sequences)
    cache = DeviceKVCache(layout, num_blocks, device, loaded.ops)
    runner = ModelRunner(loaded, cache)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    (runner.execute if rank == 0 else runner.follow)(step)
    torch.cuda.synchronize(device)
    largest = torch.cuda.max_memory_allocated(device) - before
    del runner, cache
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return Usage(total, free, weights, largest)
