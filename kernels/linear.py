"""A linear layer whose weight is brought into the device's favourite order once, at load."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class PackedLinear(Protocol):
    """x: [num_tokens, in_features] in the weight's dtype -> [num_tokens, out_features]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    """torch's own linear on the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class OneDnnLinear:
    """oneDNN's blocked weight order, so no call reorders or packs the weight again. fp32 stays fp32.

    Microseconds of torch's linear -> this one (two cores of an EPYC with AVX-512 and its bf16 products, torch 2.13,
    2026-12):

        in x out, rows       bf16              fp32
        576 x 1536, 1        86 -> 51          68 -> 46
        576 x 1536, 16       190 -> 152        292 -> 166
        576 x 1536, 512      4299 -> 4136      4852 -> 4441
        576 x 49152, 1       5725 -> 2494      10323 -> 5757
        576 x 49152, 16      8822 -> 5099      21505 -> 5933
        576 x 49152, 512     87772 -> 82786    214488 -> 156595
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Prepare x @ weight.T + bias.

    weight:  [out_features, in_features]; a packed copy may be made, so let go of it afterwards
    bias:    [out_features] or None, in the weight's dtype
    """
    if weight.device.type == "cpu" and _onednn_takes(weight.dtype):
        return OneDnnLinear(weight, bias)
    return PlainLinear(weight, bias)


def _onednn_takes(dtype: torch.dtype) -> bool:
    """It refuses bf16 on CPUs that have neither AVX-512 nor AVX's own conversions of it."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
