"""What a worker computes with, loaded on its own, with a cache that has something in it."""

from dataclasses import dataclass

import torch

from common.bench_inside_config import InsideEngineOptions, InsideModelOptions
from common.engine.kv_cache import TORCH_DTYPES, KVCache, kv_layout
from common.engine.model_config import ModelConfig, read_model_config
from common.engine.models.llama import Llama
from common.engine.runner import ModelRunner, load_model, resolve_dtype
from common.engine.sampler import Sampler
from common.errors import ConfigError
from common.kv_layout import KVLayout
from common.machine import give_back_freed_memory, num_available_cores, num_free_bytes
from common.model_files import ModelFiles, find_model
from kernels.cpu.cores import private_cores
from kernels.dispatch import Ops


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that is not loaded yet."""

    files: ModelFiles
    config: ModelConfig
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model. The runner uses the other parts; whoever looks at steps from inside does without it."""

    source: ModelSource
    num_cores: int
    cache: KVCache
    model: Llama
    ops: Ops
    sampler: Sampler
    runner: ModelRunner


def find_source(options: InsideModelOptions) -> ModelSource:
    """Raises: ConfigError, ModelError."""
    files = find_model(options.model)
    config = read_model_config(files)
    layout = kv_layout(config, resolve_dtype(options.dtype), options.block_size, files.model_hash)
    return ModelSource(files, config, layout)


def load_engine(source: ModelSource, options: InsideEngineOptions, quantization: str, num_blocks: int) -> Engine:
    """Blocks for seconds. Raises: ConfigError, ModelError."""
    num_cores = options.cores or num_available_cores()
    cache = _filled_cache(source.layout, num_blocks)
    torch.set_num_threads(1)  # as in a worker: native ops bring their own
    model, ops = load_model(
        *(source.files, source.config, source.layout, source.files.max_context),
        *(private_cores(num_cores), options.kernels, quantization),
    )
    give_back_freed_memory()
    if ops.name == "reference":
        torch.set_num_threads(num_cores)
    sampler = Sampler(source.config.vocab_size, ops.argmax)
    return Engine(source, num_cores, cache, model, ops, sampler, ModelRunner(model, cache, sampler, ops))


def _filled_cache(layout: KVLayout, num_blocks: int) -> KVCache:
    """Every block has values of its own memory: one that was never written reads as zeros from a single page.

    Raises: ConfigError when there is not so much memory.
    """
    num_bytes, free_bytes = num_blocks * layout.block_bytes, num_free_bytes()
    if num_bytes > free_bytes:
        wanted, free = (f"{size / 1e9:.1f} GB" for size in (num_bytes, free_bytes))
        raise ConfigError(f"batch times context must fit into the {free} that are free, got {wanted} of KV")
    cache = KVCache(layout, num_blocks)
    dtype = TORCH_DTYPES[layout.dtype]
    blocks = torch.frombuffer(cache.memory, dtype=dtype).view(num_blocks, -1)
    blocks[:] = torch.randn(blocks.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    return cache
