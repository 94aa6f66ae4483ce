"""What is compiled ahead of time: launches with the sizes of models that there are."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.paged_kv import LayerKV, values_per_word
from kernels.quantised_linear import BITS, quantise_weight
from kernels.sample import Draws
from kernels.triton.decode_attention import decode_attention
from kernels.triton.gelu_and_mul import gelu_and_mul
from kernels.triton.gpu import Gpu
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.quantised_linear import quantised_linear
from kernels.triton.rms_norm import rms_norm
from kernels.triton.rope_and_cache import rope_and_cache
from kernels.triton.sample import sample
from kernels.triton.silu_and_mul import silu_and_mul
from kernels.triton.staging import gather_blocks, scatter_blocks

BLOCK_SIZE = 16
NUM_LAYERS = 4
NUM_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Case:
    """run: calls launchers, with tensors that have no memory."""

    name: str
    run: Callable[[Gpu], object]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int


MODELS = (
    Sizes("SmolLM2-135M", 576, 9, 3, 64, 1536, 49152),
    Sizes("Llama-3.1-8B", 4096, 32, 8, 128, 14336, 128256),
)
HEAD_DIMS = (64, 80, 96, 128, 256)
HALF_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
DTYPES = HALF_DTYPES | {"fp32": torch.float32}


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def layer_kv(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> LayerKV:
    pair = values_per_word(dtype)
    pieces = empty(1024, num_kv_heads, NUM_LAYERS, 2, BLOCK_SIZE * head_dim, dtype=dtype)[:, :, 0]
    keys = pieces[:, :, 0].unflatten(2, (head_dim // pair, BLOCK_SIZE, pair))
    return LayerKV(keys, pieces[:, :, 1].unflatten(2, (BLOCK_SIZE // pair, head_dim, pair)))


def layer_cases(model: Sizes, dtype_name: str, dtype: torch.dtype) -> list[Case]:
    x = empty(NUM_TOKENS, model.hidden, dtype=dtype)
    weight = empty(model.hidden, dtype=dtype)
    gate_up = empty(NUM_TOKENS, 2 * model.mlp, dtype=dtype)
    counts = [model.heads, model.kv_heads, model.kv_heads]
    q, k, v = empty(NUM_TOKENS, sum(counts), model.head_dim, dtype=dtype).split(counts, dim=1)
    cos_sin = empty(8192, model.head_dim, dtype=torch.float32)
    rows = empty(NUM_TOKENS, dtype=torch.int64)
    kv = layer_kv(model.kv_heads, model.head_dim, dtype)
    runs: dict[str, Callable[[Gpu], object]] = {
        "rms_norm": lambda gpu: rms_norm(x, weight, 1e-5, None, gpu),
        "rms_norm with residual": lambda gpu: rms_norm(x, weight, 1e-5, x, gpu),
        "silu_and_mul": lambda gpu: silu_and_mul(gate_up, gpu),
        "gelu_and_mul": lambda gpu: gelu_and_mul(gate_up, gpu),
        "rope_and_cache": lambda gpu: rope_and_cache(q, k, v, cos_sin, rows, kv, rows, gpu),
    }
    return [Case(f"{name}, {model.name}, {dtype_name}", run) for name, run in runs.items()]


def attention_cases(head_dim: int, dtype_name: str, dtype: torch.dtype) -> list[Case]:
    q = empty(NUM_TOKENS, 32, head_dim, dtype=dtype)
    kv = layer_kv(8, head_dim, dtype)
    tables, lens = empty(NUM_TOKENS, 512, dtype=torch.int32), empty(NUM_TOKENS, dtype=torch.int32)
    starts, scale = empty(NUM_TOKENS + 1, dtype=torch.int32), head_dim**-0.5
    runs: dict[str, Callable[[Gpu], object]] = {
        "decode_attention": lambda gpu: decode_attention(q[:4], kv, tables[:4], lens[:4], scale, gpu),
        "prefill_attention": lambda gpu: prefill_attention(q, kv, starts, lens, tables, scale, NUM_TOKENS, gpu),
    }
    return [Case(f"{name}, head_dim {head_dim}, {dtype_name}", run) for name, run in runs.items()]


def windowed_attention_cases(name: str, head_dim: int, window: int | None, softcap: float | None) -> list[Case]:
    """bf16, with what some models add to attention."""
    q, kv = empty(NUM_TOKENS, 16, head_dim, dtype=torch.bfloat16), layer_kv(8, head_dim, torch.bfloat16)
    tables, lens = empty(NUM_TOKENS, 512, dtype=torch.int32), empty(NUM_TOKENS, dtype=torch.int32)
    starts, scale = empty(NUM_TOKENS + 1, dtype=torch.int32), head_dim**-0.5

    def decode(gpu: Gpu) -> object:
        return decode_attention(q[:4], kv, tables[:4], lens[:4], scale, gpu, window=window, softcap=softcap)

    def prefill(gpu: Gpu) -> object:
        rows = q, kv, starts, lens, tables
        return prefill_attention(*rows, scale, NUM_TOKENS, gpu, window=window, softcap=softcap)

    return [Case(f"decode_attention, {name}", decode), Case(f"prefill_attention, {name}", prefill)]


def linear_cases(model: Sizes, quantization: str, dtype_name: str, dtype: torch.dtype) -> list[Case]:
    """One linear without a bias and one with, for few rows and for many."""
    up, down = empty(NUM_TOKENS, model.hidden, dtype=dtype), empty(NUM_TOKENS, model.mlp, dtype=dtype)
    up_weight = quantise_weight(empty(2 * model.mlp, model.hidden, dtype=dtype), quantization)
    down_weight = quantise_weight(empty(model.hidden, model.mlp, dtype=dtype), quantization)
    bias = empty(model.hidden, dtype=dtype)
    runs: dict[str, Callable[[Gpu], object]] = {
        "gate_up of 4 rows": lambda gpu: quantised_linear(up[:4], up_weight, None, gpu),
        "gate_up of many rows": lambda gpu: quantised_linear(up, up_weight, None, gpu),
        "down of 4 rows": lambda gpu: quantised_linear(down[:4], down_weight, bias, gpu),
        "down of many rows": lambda gpu: quantised_linear(down, down_weight, bias, gpu),
    }
    names = f"{model.name}, {quantization}, {dtype_name}"
    return [Case(f"quantised_linear, {name}, {names}", run) for name, run in runs.items()]


def staging_cases() -> list[Case]:
    model = MODELS[1]
    blocks = empty(1024, model.kv_heads, NUM_LAYERS * 2 * BLOCK_SIZE * model.head_dim, dtype=torch.bfloat16)
    staging, block_ids = blocks[:NUM_TOKENS, : model.kv_heads // 2].contiguous(), empty(NUM_TOKENS, dtype=torch.int64)
    return [
        Case("gather_blocks", lambda gpu: gather_blocks(blocks, block_ids, 2, staging, gpu)),
        Case("scatter_blocks", lambda gpu: scatter_blocks(staging, blocks, block_ids, 2, gpu)),
    ]


def sample_case(model: Sizes) -> Case:
    floats, ints = empty(8, dtype=torch.float32), empty(8, dtype=torch.int64)
    draws = Draws(floats, ints, floats, floats, ints, ints)
    logits = empty(8, model.vocab, dtype=torch.float32)
    return Case(f"sample, {model.name}", lambda gpu: sample(logits, draws, gpu))


CASES = [
    *(case for model in MODELS for dtype in DTYPES.items() for case in layer_cases(model, *dtype)),
    *(case for head_dim in HEAD_DIMS for dtype in DTYPES.items() for case in attention_cases(head_dim, *dtype)),
    *(
        case
        for model in MODELS
        for quantization in BITS
        for dtype in DTYPES.items()
        for case in linear_cases(model, quantization, *dtype)
    ),
    *windowed_attention_cases("window of Mistral-7B", 128, 4096, None),
    *windowed_attention_cases("window and soft-cap of Gemma-2-9B", 256, 4096, 50.0),
    *windowed_attention_cases("soft-cap of Gemma-2-9B", 256, None, 50.0),
    *staging_cases(),
    *(sample_case(model) for model in MODELS),
]
