"""Weights in the order that the kernels read: panels of 16 output columns, 32-bit words of one or two inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.memory import HugeMemory
from kernels.quantised_linear import BITS, GROUP, quantise

FORMATS = {"none": 0, "int8": 1, "int4": 2}
"""How weights are stored -> linear.h's number for it."""

LANES = 16


@dataclass(frozen=True)
class PackedWeight:
    """What linear.h calls a Linear, and the memory it lies in.

    format:  linear.h's
    panels:  plain weights: [num_panels, in / pair, 16, pair];
             quantised ones: int32 [num_panels, in / 32, 1 + bits, 16], scales and then integers; see quantised.h
    bias:    fp32 [out] in the panels' order of columns, or None
    in_size: padded;  out_size: columns, of the last panel only those that there are
    """

    format: int
    panels: Tensor
    bias: Tensor | None
    in_size: int
    out_size: int


def round_up(value: int, to: int) -> int:
    return -(-value // to) * to


def pack(weight: Tensor, bias: Tensor | None, memory: HugeMemory) -> PackedWeight:
    """weight: [out, in] fp32 or bf16;  bias: [out] or None."""
    out_size, in_size = weight.shape
    padded = round_up(in_size, GROUP)
    num_panels = -(-out_size // LANES)
    pair = 4 // weight.element_size()
    panels = memory.zeros((num_panels, padded // pair, LANES, pair), weight.dtype)
    for first in range(0, num_panels, 256):  # in pieces: no second copy of a whole weight
        rows = weight[first * LANES : (first + 256) * LANES]
        piece = torch.zeros(round_up(len(rows), LANES), padded, dtype=weight.dtype)
        piece[: len(rows), :in_size] = rows
        panels[first : first + 256] = piece.view(-1, LANES, padded // pair, pair).transpose(1, 2)
    return PackedWeight(FORMATS["none"], panels, None if bias is None else bias.float().contiguous(), padded, out_size)


def pack_quantised(weight: Tensor, bias: Tensor | None, quantization: str, memory: HugeMemory) -> PackedWeight:
    """Round to 4 or 8 bits; see quantised_linear.py. weight: [out, in] fp32."""
    out_size, in_size = weight.shape
    num_panels, padded = -(-out_size // LANES), round_up(in_size, GROUP)
    num_groups, bits = padded // GROUP, BITS[quantization]
    panels = memory.zeros((num_panels, num_groups, 1 + bits, LANES), torch.int32)
    for first in range(0, num_panels, 256):
        rows = weight[first * LANES : (first + 256) * LANES].float()
        piece = torch.zeros(round_up(len(rows), LANES), padded)
        piece[: len(rows), :in_size] = rows
        q, scale, offset = quantise(piece.unflatten(1, (num_groups, GROUP)), 2**bits - 1)
        scales = torch.stack((scale, offset), 2).unflatten(0, (-1, LANES)).permute(0, 2, 3, 1)
        place = panels[first : first + 256]
        place[:, :, 0] = scales.flatten(2).contiguous().view(torch.int32)
        place[:, :, 1:] = _pack_integers(q, bits)
    bias = None if bias is None else bias.float().contiguous()
    return PackedWeight(FORMATS[quantization], panels, bias, padded, out_size)


def _pack_integers(q: Tensor, bits: int) -> Tensor:
    """[num_rows, num_groups, 32] of 0 … 2**bits - 1 -> [num_panels, num_groups, bits, 16]."""
    num_pairs = 16 // bits
    q = q.view(-1, LANES, q.shape[1], bits, num_pairs, 2)
    first_bit = {8: 15, 4: 16}[bits]
    places = [[first_bit + 2 * bits * pair, first_bit + 2 * bits * pair - bits] for pair in range(num_pairs)]
    words = (q.long() << torch.tensor(places)).sum((-1, -2))
    words = words | words >> 32  # what goes beyond a word's end comes in at its other one
    return words.permute(0, 2, 3, 1).to(torch.int32)


def alternate(gate_up: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows of gate and of up in turns of 16, each padded with zeros to a multiple of 16."""
    size = len(gate_up) // 2
    padded = round_up(size, LANES)

    def order(rows: Tensor) -> Tensor:
        both = torch.zeros(2, padded, *rows.shape[1:], dtype=rows.dtype)
        both[0, :size], both[1, :size] = rows[:size], rows[size:]
        return both.unflatten(1, (-1, LANES)).transpose(0, 1).flatten(0, 2)

    return order(gate_up), None if bias is None else order(bias)
