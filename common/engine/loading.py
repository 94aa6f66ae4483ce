"""From a worker's options to a loaded model: what all its ranks agree on, and what each of them loads."""

import logging
import resource
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from mmap import mmap

import torch

from common.config import ModelOptions, PrefillCommand, WorkerCommand
from common.engine.core_board import CoreBoard, find_cores
from common.engine.cuda_graphs import CudaCapture, DecodeGraphs, graph_sizes
from common.engine.device_cache import DeviceKVCache
from common.engine.devices import Placement, place_ranks
from common.engine.gpu_memory import largest_step, measure_usage
from common.engine.kv_cache import KVCache, PagedCache, kv_layout
from common.engine.model_config import ModelConfig, read_model_config
from common.engine.parallel import Shard, split_model
from common.engine.runner import LoadedModel, ModelRunner, load_model, resolve_dtype
from common.errors import ConfigError
from common.kv_layout import KVLayout
from common.machine import give_back_freed_memory, num_available_cores, num_free_bytes, touch_pages
from common.model_files import ModelFiles, find_model, longest_sequence
from common.wire import MIN_CONTEXT, Role
from common.worker_config import WorkerOptions
from kernels.group import Group

logger = logging.getLogger(__name__)

AUTO_MEMORY_SHARE = 0.2
"""Of the free memory, for one worker's KV cache: a prefill and a decode worker and their weights fit one host."""
AUTO_MAX_TOKENS = 65_536
"""A CPU computes no batch that needs more KV than this."""

Allocate = Callable[[int], mmap | memoryview | None]
"""Memory for a cache, given its size in bytes; None: let the cache allocate it."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What follows from the options and the model's files alone, so that all ranks find the same.

    layout:      of whole blocks, with all KV heads
    shards:      by rank
    placements:  what each rank computes on
    """

    files: ModelFiles
    config: ModelConfig
    layout: KVLayout
    max_model_len: int
    shards: Sequence[Shard]
    placements: Sequence[Placement]

    def layout_at(self, rank: int) -> KVLayout:
        """Of the blocks in this rank's own cache."""
        return self.layout.of_heads(len(self.shards[rank].kv_heads))

    @property
    def block_bytes(self) -> int:
        """Of one block in the caches of all ranks."""
        return sum(self.layout_at(shard.rank).block_bytes for shard in self.shards)


def plan_model(model: ModelOptions, worker: WorkerOptions) -> ModelPlan:
    """Raises: ConfigError, ModelError."""
    placements = place_ranks(worker)
    files = find_model(model.model)
    config = read_model_config(files)
    layout = kv_layout(config, resolve_dtype(model.dtype, placements[0].device), worker.block_size, files.model_hash)
    max_model_len = longest_sequence(files, model.max_model_len)
    if max_model_len < MIN_CONTEXT:
        raise ConfigError(f"max_model_len must be at least {MIN_CONTEXT}, got {max_model_len}")
    return ModelPlan(files, config, layout, max_model_len, split_model(config, worker.tensor_parallel_size), placements)


def size_cache(plan: ModelPlan, wanted_bytes: int) -> int:
    """Blocks of the cache: as many as asked for, of all ranks together, else a share of the free memory.

    0 on GPUs where nothing was asked for: what is free there is known when the weights are loaded.
    Raises: ConfigError when there is not so much, or not even one sequence of a few tokens fits.
    """
    if plan.placements[0].is_gpu and not wanted_bytes:
        return 0
    free_bytes, block_size = num_free_bytes(), plan.layout.block_size
    if wanted_bytes > free_bytes and not plan.placements[0].is_gpu:
        wanted, free = (f"{num_bytes / 1e9:.1f} GB" for num_bytes in (wanted_bytes, free_bytes))
        raise ConfigError(f"kv_cache_memory must fit into the {free} that are free, got {wanted}")
    if wanted_bytes:
        num_blocks = wanted_bytes // plan.block_bytes
    else:
        useful = -(-max(AUTO_MAX_TOKENS, plan.max_model_len) // block_size)
        num_blocks = min(useful, int(free_bytes * AUTO_MEMORY_SHARE) // plan.block_bytes)
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_memory must hold at least 2 blocks of {plan.block_bytes} bytes, it holds {num_blocks}"
        )
    return num_blocks


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """One rank's part of a worker: its weights, in the runner, and its cache."""

    cache: PagedCache
    runner: ModelRunner
    board: CoreBoard | None

    def on_tick(self) -> None:
        """Several times a second."""
        if self.board:
            self.board.refresh()


def load_shard(
    plan: ModelPlan,
    rank: int,
    num_blocks: int,
    role: Role,
    command: WorkerCommand,
    allocate: Allocate,
    *,
    group: Group | None = None,
    agree: Callable[[int], int] = lambda num_blocks: num_blocks,
    report: Callable[[str, float], None] = lambda what, fraction: None,
) -> LoadedShard:
    """Allocate the cache, then load the weights; on a GPU the other way round. Blocks for seconds.

    group: who has the other shards, if there are any
    agree: from the blocks that we have room for to those of all ranks, where num_blocks is 0
    Raises: ConfigError, ModelError.
    """
    worker, layout, placement = command.worker, plan.layout_at(rank), plan.placements[rank]
    num_cores = worker.cores or num_available_cores()
    cores, board = find_cores(
        *(worker.shared_dir, num_cores), borrows=worker.core_sharing == "elastic", is_urgent=role is Role.DECODE
    )
    torch.set_num_threads(1)  # native ops bring their own; a second set of threads would fight for the cores
    cache = None if placement.is_gpu else _allocate_cache(layout, num_blocks, allocate)
    loaded = load_model(
        *(plan.files, plan.config, layout, plan.max_model_len, cores, worker.kernels, command.model.quantization),
        device=placement.device,
        shard=plan.shards[rank],
        group=group,
        progress=lambda fraction: report("loading weights", fraction),
    )
    give_back_freed_memory()  # each weight was read, converted and packed: two copies of the largest are left over
    runner = ModelRunner(loaded, cache) if cache else _on_gpu(loaded, plan, rank, num_blocks, command, agree, report)
    cache, num_blocks = runner.kv_cache, runner.kv_cache.num_blocks
    if rank == 0 and num_blocks * layout.block_size < plan.max_model_len:
        logger.warning(
            "the KV cache holds %d tokens: longer requests are refused, although the model takes %d",
            *(num_blocks * layout.block_size, plan.max_model_len),
        )
    if runner.ops.name == "reference":
        torch.set_num_threads(cores.num_home())
    logger.info(
        "%s: %s, rank %d of %d, %s, KV cache of %d blocks (%d tokens, %.0f MB), %s kernels, %d cores, peak of %.0f MB",
        *(plan.files.name, role, rank, len(plan.shards), layout.dtype, num_blocks, num_blocks * layout.block_size),
        *(num_blocks * layout.block_bytes / 1e6, runner.ops.name, num_cores, _peak_bytes() / 1e6),
    )
    return LoadedShard(cache, runner, board)


def _on_gpu(
    loaded: LoadedModel,
    plan: ModelPlan,
    rank: int,
    num_blocks: int,
    command: WorkerCommand,
    agree: Callable[[int], int],
    report: Callable[[str, float], None],
) -> ModelRunner:
    """A cache in what the largest step leaves of the GPU's memory, and graphs of the decode steps over it."""
    layout, placement = plan.layout_at(rank), plan.placements[rank]
    try:
        if not num_blocks:
            step = largest_step(command, plan.max_model_len, layout.block_size)
            usage = measure_usage(loaded, layout, step, placement, rank)
            sharing = command.worker.gpu_memory_utilization, placement.num_sharing
            num_blocks = agree(usage.num_blocks(layout.block_bytes, *sharing))
        cache = DeviceKVCache(layout, num_blocks, placement.device, loaded.ops)
        if isinstance(command, PrefillCommand) or loaded.ops.name == "reference":  # which waits for lengths
            return ModelRunner(loaded, cache)
        sizes, capture = graph_sizes(command.decode.max_num_seqs), CudaCapture(placement.device)
        report_graphs = lambda fraction: report("capturing graphs", fraction)  # noqa: E731
        graphs = DecodeGraphs(loaded.model, cache, sizes, plan.max_model_len, capture, report_graphs)
        return ModelRunner(loaded, cache, graphs)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the GPU's memory does not hold weights, steps and KV cache: {error}") from error


def _peak_bytes() -> int:
    """Memory that this process has had at most; Linux counts it in KB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _allocate_cache(layout: KVLayout, num_blocks: int, allocate: Allocate) -> KVCache:
    """Raises: ConfigError when this process may not have so much, whatever is free."""
    num_bytes = num_blocks * layout.block_bytes
    try:
        cache = KVCache(layout, num_blocks, allocate(num_bytes))
    except OSError as error:
        raise ConfigError(f"kv_cache_memory: cannot allocate {num_bytes / 1e9:.1f} GB: {error}") from error
    # After a prompt of 1,024 tokens that was the first in its blocks, the second token came in 80 ms, later in 28.
    threading.Thread(target=touch_pages, args=(cache.memory,), name="cache pages", daemon=True).start()
    return cache
