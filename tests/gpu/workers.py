"""Models loaded as workers load them: from what is said to a worker to the runner."""

from pathlib import Path
from typing import Literal

from common.config import DecodeCommand, ModelOptions, PrefillCommand, WorkerCommand
from common.engine.loading import load_shard, plan_model, size_cache
from common.engine.runner import ModelRunner
from common.flag_values import ByteSize
from common.wire import Role
from common.worker_config import DecodeOptions, WorkerOptions

Kernels = Literal["triton", "reference"]
Quantization = Literal["none", "int8", "int4"]
MAX_NUM_SEQS = 16
KV_BYTES = 64 * 10**6
UTILIZATION = 0.1


def prefill_runner(model: Path, kernels: Kernels, quantization: Quantization = "none") -> ModelRunner:
    """On the GPU, without graphs."""
    command = PrefillCommand(model=_model(model, quantization), worker=_worker(kernels, KV_BYTES))
    return _load(command, Role.PREFILL)


def decode_runner(
    model: Path, kernels: Kernels, quantization: Quantization = "none", kv_bytes: int = KV_BYTES
) -> ModelRunner:
    """On the GPU, with graphs where the kernels can be captured. kv_bytes: 0: what UTILIZATION leaves."""
    command = DecodeCommand(
        model=_model(model, quantization),
        worker=_worker(kernels, kv_bytes),
        decode=DecodeOptions(max_num_seqs=MAX_NUM_SEQS),
    )
    return _load(command, Role.DECODE)


def _load(command: WorkerCommand, role: Role) -> ModelRunner:
    plan = plan_model(command.model, command.worker)
    num_blocks = size_cache(plan, command.worker.kv_cache_memory)
    return load_shard(plan, 0, num_blocks, role, command, lambda num_bytes: None).runner


def _model(model: Path, quantization: Quantization) -> ModelOptions:
    return ModelOptions(model=str(model), dtype="float32", quantization=quantization)


def _worker(kernels: Kernels, kv_bytes: int) -> WorkerOptions:
    return WorkerOptions(
        device="cuda", kernels=kernels, kv_cache_memory=ByteSize(kv_bytes), gpu_memory_utilization=UTILIZATION
    )
