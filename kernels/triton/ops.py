"""Triton's ops as a device's small ops."""

from functools import partial

import torch
import triton
from torch import Tensor

from kernels.composed import SmallOps
from kernels.errors import NoOps
from kernels.linear import PackedLinear, pack_linear
from kernels.quantised_linear import quantise_weight
from kernels.triton.decode_attention import decode_attention
from kernels.triton.gpu import Gpu, gpu_of
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.quantised_linear import quantised_linear
from kernels.triton.rms_norm import rms_norm
from kernels.triton.rope_and_cache import rope_and_cache
from kernels.triton.sample import sample
from kernels.triton.silu_and_mul import silu_and_mul
from kernels.triton.staging import gather_blocks, scatter_blocks

HEAD_DIMS = (64, 80, 96, 128, 256)
"""Those that kernels are compiled for ahead of time; the interpreter takes every one."""


class QuantisedLinear:
    """A `PackedLinear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, quantization: str, gpu: Gpu) -> None:
        self._weight = quantise_weight(weight, quantization)
        self._bias = bias
        self._gpu = gpu

    def __call__(self, x: Tensor) -> Tensor:
        return quantised_linear(x, self._weight, self._bias, self._gpu)


def pack(weight: Tensor, bias: Tensor | None, quantization: str, gpu: Gpu) -> PackedLinear:
    return pack_linear(weight, bias) if quantization == "none" else QuantisedLinear(weight, bias, quantization, gpu)


def small_ops(device: torch.device, head_dim: int, quantization: str) -> tuple[str, SmallOps]:
    """Of a GPU, or of Triton's interpreter on a CPU; and their name. Linears are the vendor's own, by torch.

    Raises: NoOps.
    """
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise NoOps("a CPU runs Triton's kernels in its interpreter only, for tests: TRITON_INTERPRET=1")
    if device.type != "cpu" and head_dim not in HEAD_DIMS:
        raise NoOps(f"head_dim must be one of {', '.join(map(str, HEAD_DIMS))}, got {head_dim}")
    gpu = gpu_of(device)
    name = gpu.family if quantization == "none" else f"{gpu.family}, {quantization}"
    # The head has 8 bits at least: every error of a logit is seen, and GGUF's converters do the same.
    head = quantization if quantization == "none" else "int8"
    return f"triton ({name})", SmallOps(
        pack=partial(pack, quantization=quantization, gpu=gpu),
        pack_head=partial(pack, quantization=head, gpu=gpu),
        rms_norm=partial(rms_norm, gpu=gpu),
        rope_and_cache=partial(rope_and_cache, gpu=gpu),
        decode_attention=partial(decode_attention, gpu=gpu),
        prefill_attention=partial(prefill_attention, gpu=gpu),
        silu_and_mul=partial(silu_and_mul, gpu=gpu),
        sample=partial(sample, gpu=gpu),
        gather_blocks=partial(gather_blocks, gpu=gpu),
        scatter_blocks=partial(scatter_blocks, gpu=gpu),
    )
