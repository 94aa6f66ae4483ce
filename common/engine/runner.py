"""Runs step plans: the one place where model, cache and sampler meet."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.batch import Batch, build_batch
from common.engine.cuda_graphs import DecodeGraphs
from common.engine.devices import CPU
from common.engine.kv_cache import TORCH_DTYPES, PagedCache
from common.engine.model_config import ModelConfig
from common.engine.models.llama import Llama
from common.engine.parallel import Shard, whole
from common.engine.sampler import Sampler
from common.engine.step import StepPlan, StepResult
from common.engine.weights import Progress, open_weights
from common.errors import ConfigError, ModelError
from common.ids import BlockId
from common.kv_layout import HeadChecksums, KVLayout
from common.model_files import ModelFiles
from kernels.cpu.cores import Cores
from kernels.dispatch import Ops, OpsRequest, choose_ops
from kernels.group import Group

_GGUF_QUANTIZATION = {2: "int4", 3: "int4", 8: "int8"}
"""gguf.GGMLQuantizationType: Q4_0, Q4_1 and Q8_0."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or our shard of it, and what it computes with."""

    model: Llama
    sampler: Sampler
    ops: Ops


class ModelRunner:
    """Executes one plan after the other, on the calling thread. Writes into the cache's blocks that plans name.

    model, sampler, ops: for whoever looks at a step's parts one by one
    graphs:              of decode steps, on a GPU
    """

    def __init__(self, loaded: LoadedModel, kv_cache: PagedCache, graphs: DecodeGraphs | None = None) -> None:
        self.ops = loaded.ops
        self.model = loaded.model
        self.sampler = loaded.sampler
        self.kv_cache = kv_cache
        self.graphs = graphs

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens, sample where asked, seal what is finished. Blocks for the whole step."""
        started = time.perf_counter()
        batch = build_batch(plan, self.kv_cache.layout.block_size)
        logits = self._forward(batch)
        token_ids, failed_rows = self.sampler.sample(logits, batch.sampled)
        sampled = {
            sequence.key: token_id
            for row, (sequence, token_id) in enumerate(zip(batch.sampled, token_ids, strict=True))
            if row not in failed_rows
        }
        return StepResult(
            sampled=sampled,
            failed={batch.sampled[row].key: reason for row, reason in failed_rows.items()},
            checksums=self.kv_cache.checksums(_sealed(plan)),
            duration_s=time.perf_counter() - started,
        )

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> Mapping[BlockId, HeadChecksums]:
        """As a rank other than rank 0: compute our part of a step that rank 0 executes. Returns our checksums."""
        self._forward(build_batch(plan, self.kv_cache.layout.block_size))
        return self.kv_cache.checksums(_sealed(plan))

    def _forward(self, batch: Batch) -> Tensor:
        if self.graphs and self.graphs.takes(batch):
            return self.graphs.forward(batch)
        return self.model.forward(batch.to(self.kv_cache.blocks.device), self.kv_cache)

    def counters(self) -> dict[str, float]:
        """Totals for /metrics. Any thread may ask."""
        return {"helped_tasks": float(self.ops.num_helped)}

    def allow_binding(self) -> None:
        """From now on this thread may be bound to a core, and whoever it starts with it."""
        self.ops.allow_binding()

    def claim_cores(self) -> None:
        self.ops.claim_cores()

    def rest(self) -> None:
        self.ops.rest()

    def others_want_cores(self) -> bool:
        return self.ops.others_want_cores()


def _sealed(plan: StepPlan) -> list[BlockId]:
    return [block_id for sequence in plan.sequences for block_id in sequence.seal]


def resolve_dtype(name: str, device: torch.device = CPU) -> str:
    """`auto` is bfloat16 where the device computes it natively, else float32, or float16 on a GPU.

    Raises: ConfigError if there is no such dtype.
    """
    if name == "auto" and device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if name == "auto":
        return "bfloat16" if _computes_bfloat16() else "float32"
    if name not in TORCH_DTYPES:
        raise ConfigError(f"dtype must be one of auto, {', '.join(TORCH_DTYPES)}, got {name!r}")
    return name


def resolve_quantization(name: str, files: ModelFiles) -> str:
    """`auto` is what the linears of a GGUF file are stored in, where we have it, and none for other files."""
    if name != "auto":
        return name
    tensor = files.gguf.tensors.get("blk.0.ffn_up.weight") if files.gguf else None
    return _GGUF_QUANTIZATION.get(tensor.type_id, "none") if tensor else "none"


def _computes_bfloat16() -> bool:
    """oneDNN also takes bf16 where AVX-512 lacks its products, and emulates them."""
    is_emulated = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and not is_emulated


def load_model(
    files: ModelFiles,
    config: ModelConfig,
    layout: KVLayout,
    max_model_len: int,
    cores: Cores,
    kernels: str = "auto",
    quantization: str = "none",
    *,
    device: torch.device = CPU,
    shard: Shard | None = None,
    group: Group | None = None,
    progress: Progress = lambda fraction: None,
) -> LoadedModel:
    """Load the weights. Blocks for as long as that takes.

    layout:         of the cache, whose dtype is the weights', too
    max_model_len:  tokens of the longest sequence
    cores:          that native ops may use
    kernels:        which ops, by the names of kernels.dispatch
    quantization:   of linears, by the names of kernels.cpu.packing
    device:         that the weights and the cache are on
    shard, group:   the part of the model that is ours, and who has the others; None: all of it is

    Raises: ConfigError if max_model_len or kernels cannot be; ModelError if the weights are not the config's.
    """
    if not 0 < max_model_len <= config.max_context:
        raise ConfigError(
            f"max_model_len must be at most {config.max_context} (max_position_embeddings"
            f" {config.max_position_embeddings}, sliding_window {config.sliding_window}), got {max_model_len}"
        )
    dtype = TORCH_DTYPES[layout.dtype]
    request = OpsRequest(
        dtype=dtype,
        head_dim=config.head_dim,
        block_size=layout.block_size,
        device=device,
        quantization=resolve_quantization(quantization, files),
    )
    try:
        ops = choose_ops(kernels, request, cores, group)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        weights = open_weights(files, config, dtype, shard or whole(config), progress, device)
        model = Llama(weights, config, ops, max_model_len, group)
    except ModelError as error:
        raise ModelError(f"model {files.name} ({files.path}): {error}") from error
    return LoadedModel(model, Sampler(config.vocab_size, ops), ops)
