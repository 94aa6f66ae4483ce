"""A linear layer of weights in 8 or 4 bits, with a scale and an offset for every 32 inputs of an output."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
"""Inputs that share a scale; inputs are padded to a multiple of it with zeros."""
BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """Row by row, as they are multiplied; a weight is integer * scale + offset.

    integers:       uint8 [out, num_groups, 32], or in 4 bits [out, num_groups, 16]: a byte has an input of the first
                    half of its group in its lower bits, and one of the second half in its upper bits
    scale, offset:  fp16 [out, num_groups]
    in_size:        without padding
    """

    integers: Tensor
    scale: Tensor
    offset: Tensor
    in_size: int

    @property
    def out_size(self) -> int:
        return self.integers.shape[0]

    @property
    def bits(self) -> int:
        return self.integers.shape[2] * 8 // GROUP

    def dequantise(self) -> Tensor:
        """[out, in] fp32."""
        q = self.integers
        if self.bits == 4:
            q = torch.cat((q & 15, q >> 4), dim=2)
        weight = q * self.scale.float().unsqueeze(2) + self.offset.float().unsqueeze(2)
        return weight.flatten(1)[:, : self.in_size]


def quantised_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias.

    x:     [num_tokens, in], any dtype of floats
    bias:  [out] or None, in x's dtype
    Returns [num_tokens, out] in x's dtype. Weights are rounded to it before the product; sums are fp32.
    """
    rounded = weight.dequantise().to(x.dtype).float()
    return F.linear(x.float(), rounded, None if bias is None else bias.float()).to(x.dtype)


def quantise_weight(weight: Tensor, quantization: str) -> QuantisedWeight:
    """weight: [out, in];  quantization: one of BITS."""
    bits, in_size = BITS[quantization], weight.shape[1]
    groups = F.pad(weight.float(), (0, -in_size % GROUP)).unflatten(1, (-1, GROUP))
    q, scale, offset = quantise(groups, 2**bits - 1)
    if bits == 4:
        first, second = q.chunk(2, dim=2)
        q = first | second << 4
    return QuantisedWeight(q.to(torch.uint8), scale, offset, in_size)


def quantise(groups: Tensor, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """The smallest value of a group becomes 0 and the largest the largest integer.

    That is GGUF's Q4_1 if there are 4 bits: what was in that format is recovered exactly.
    groups: [..., 32] fp32
    Returns (q int32, scale, offset) with groups close to q * scale + offset, q <= largest.
    scale and offset, [...] fp16, are rounded before q is chosen, so that their error is made up for.
    """
    offset = groups.amin(-1).half()
    scale = ((groups.amax(-1) - offset.float()) / largest).half()
    steps = (groups - offset.float().unsqueeze(-1)) / scale.float().clamp(min=1e-8).unsqueeze(-1)
    return steps.round().clamp(0, largest).int(), scale, offset
