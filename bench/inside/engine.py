"""A decode worker's engine without the worker, with a cache that has something in it."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import torch

from common.bench_inside_config import InsideEngineOptions, InsideModelOptions, RanksOptions
from common.config import DecodeCommand, LogOptions, ModelOptions, WorkerOptions
from common.engine.kv_cache import PagedCache
from common.engine.loading import ModelPlan, plan_model
from common.engine.worker_main import Engine, start_engine
from common.errors import ConfigError
from common.machine import num_available_cores, num_free_bytes
from common.wire import Role
from kernels.group import GroupBroken


def decode_command(
    model: InsideModelOptions, engine: InsideEngineOptions | None = None, ranks: RanksOptions | None = None
) -> DecodeCommand:
    """Of the worker whose engine it is; its other ranks log what goes wrong. None: the defaults."""
    engine, ranks = engine or InsideEngineOptions(), ranks or RanksOptions()
    return DecodeCommand(
        model=ModelOptions(model=model.model, dtype=model.dtype),
        worker=WorkerOptions(
            block_size=model.block_size,
            cores=engine.cores or num_available_cores(),
            kernels=engine.kernels,
            tensor_parallel_size=ranks.tensor_parallel_size,
            collectives=ranks.collectives,
        ),
        log=LogOptions(log_level="warning"),
    )


def quantised(command: DecodeCommand, quantization: str) -> DecodeCommand:
    return replace(command, model=replace(command.model, quantization=quantization))


def plan_engine(command: DecodeCommand) -> ModelPlan:
    """What is known before anything is loaded. Raises: ConfigError, ModelError."""
    return plan_model(command.model, command.worker)


@contextmanager
def load_engine(plan: ModelPlan, command: DecodeCommand, num_blocks: int) -> Generator[Engine]:
    """Blocks for seconds; other ranks end with the context.

    plan: of this command
    Raises: ConfigError, ModelError, GroupFailed.
    """
    num_bytes, free_bytes = num_blocks * plan.block_bytes, num_free_bytes()
    if num_bytes > free_bytes and not plan.placements[0].is_gpu:
        wanted, free = (f"{size / 1e9:.1f} GB" for size in (num_bytes, free_bytes))
        raise ConfigError(f"batch times context must fit into the {free} that are free, got {wanted} of KV")
    with start_engine(plan, num_blocks, Role.DECODE, command, lambda _: None) as engine:
        _fill(engine.own.cache)
        try:
            yield engine
        except GroupBroken as error:
            assert engine.group is not None, "who is alone has no group"
            raise engine.group.failure() from error


def _fill(cache: PagedCache) -> None:
    """Every block has the same values, in memory of its own."""
    blocks = cache.blocks
    blocks[:] = torch.randn(blocks.shape[1:], generator=torch.Generator().manual_seed(0)).to(blocks.dtype)
