"""Runs step plans: the one place where model, cache and sampler meet."""

import time
from collections.abc import Mapping

import torch

from common.engine.batch import build_batch
from common.engine.kv_cache import TORCH_DTYPES, KVCache
from common.engine.model_config import ModelConfig
from common.engine.models.llama import Llama
from common.engine.parallel import Shard, whole
from common.engine.sampler import Sampler
from common.engine.step import StepPlan, StepResult
from common.engine.weights import Progress, open_weights
from common.errors import ConfigError, ModelError
from common.ids import BlockId
from common.kv_layout import HeadChecksums
from common.model_files import ModelFiles
from kernels.cpu.cores import Cores
from kernels.dispatch import Ops, OpsRequest, choose_ops
from kernels.group import Group

_GGUF_QUANTIZATION = {2: "int4", 3: "int4", 8: "int8"}
"""gguf.GGMLQuantizationType: Q4_0, Q4_1 and Q8_0."""


class ModelRunner:
    """Executes one plan after the other, on the calling thread. Writes into the cache's blocks that plans name.

    model, sampler, ops: for whoever looks at a step's parts one by one
    """

    def __init__(self, model: Llama, kv_cache: KVCache, sampler: Sampler, ops: Ops) -> None:
        self.ops = ops
        self.model = model
        self.sampler = sampler
        self.kv_cache = kv_cache

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens, sample where asked, seal what is finished. Blocks for the whole step."""
        started = time.perf_counter()
        batch = build_batch(plan, self.kv_cache.layout.block_size)
        logits = self.model.forward(batch, self.kv_cache)
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
        self.model.forward(build_batch(plan, self.kv_cache.layout.block_size), self.kv_cache)
        return self.kv_cache.checksums(_sealed(plan))

    def counters(self) -> dict[str, float]:
        """Totals for /metrics. Any thread may ask."""
        return {"helped_tasks": float(self.ops.num_helped)}

    def rest(self) -> None:
        self.ops.rest()

    def others_want_cores(self) -> bool:
        return self.ops.others_want_cores()


def _sealed(plan: StepPlan) -> list[BlockId]:
    return [block_id for sequence in plan.sequences for block_id in sequence.seal]


def resolve_dtype(name: str) -> str:
    """`auto` is bfloat16 where the CPU computes it natively, else float32.

    Raises: ConfigError if there is no such dtype.
    """
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


def load_runner(
    files: ModelFiles,
    config: ModelConfig,
    kv_cache: KVCache,
    max_model_len: int,
    cores: Cores,
    kernels: str = "auto",
    quantization: str = "none",
    *,
    shard: Shard | None = None,
    group: Group | None = None,
    progress: Progress = lambda fraction: None,
) -> ModelRunner:
    """Load the weights in the cache's dtype. Blocks for as long as that takes.

    max_model_len:  tokens of the longest sequence
    cores:          that native ops may use
    kernels:        which ops, by the names of kernels.dispatch
    quantization:   of linears, by the names of kernels.cpu.packing
    shard, group:   the part of the model that is ours, and who has the others; None: all of it is

    Raises: ConfigError if max_model_len or kernels cannot be; ModelError if the weights are not the config's.
    """
    if not 0 < max_model_len <= config.max_context:
        raise ConfigError(
            f"max_model_len must be at most {config.max_context} (max_position_embeddings"
            f" {config.max_position_embeddings}, sliding_window {config.sliding_window}), got {max_model_len}"
        )
    try:
        layout = kv_cache.layout
        dtype = TORCH_DTYPES[layout.dtype]
        request = OpsRequest(
            dtype=dtype,
            head_dim=config.head_dim,
            block_size=layout.block_size,
            quantization=resolve_quantization(quantization, files),
        )
        ops = choose_ops(kernels, request, cores, group)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        weights = open_weights(files, config, dtype, shard or whole(config), progress)
        model = Llama(weights, config, ops, max_model_len, group)
    except ModelError as error:
        raise ModelError(f"model {files.name} ({files.path}): {error}") from error
    return ModelRunner(model, kv_cache, Sampler(config.vocab_size, ops), ops)
