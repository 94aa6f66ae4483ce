"""Weights in the order that the kernels read: panels of 16 output columns, 32-bit words of one or two inputs."""

import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LANES = 16
GROUP = 32
"""Inputs that share a scale in quantised weights; inputs are padded to a multiple of it with zeros."""

_HUGE_PAGE = 1 << 21


@dataclass(frozen=True)
class PackedWeight:
    """What linear.h calls a Linear, and the memory it lies in.

    panels:  [num_panels, in / pair, 16, pair] for plain weights
    scales:  fp16 [num_panels, in / 32, 2 (scale, offset), 16], or None
    bias:    fp32 [out] in the panels' order of columns, or None
    in_size: padded;  out_size: columns, of the last panel only those that there are
    """

    panels: Tensor
    scales: Tensor | None
    bias: Tensor | None
    in_size: int
    out_size: int


def round_up(value: int, to: int) -> int:
    return -(-value // to) * to


def pack(weight: Tensor, bias: Tensor | None) -> PackedWeight:
    """weight: [out, in] fp32 or bf16;  bias: [out] or None."""
    out_size, in_size = weight.shape
    padded = round_up(in_size, GROUP)
    num_panels = -(-out_size // LANES)
    pair = 4 // weight.element_size()
    panels = huge_zeros((num_panels, padded // pair, LANES, pair), weight.dtype)
    for first in range(0, num_panels, 256):  # in pieces: no second copy of a whole weight
        rows = weight[first * LANES : (first + 256) * LANES]
        piece = torch.zeros(round_up(len(rows), LANES), padded, dtype=weight.dtype)
        piece[: len(rows), :in_size] = rows
        panels[first : first + 256] = piece.view(-1, LANES, padded // pair, pair).transpose(1, 2)
    return PackedWeight(panels, None, None if bias is None else bias.float().contiguous(), padded, out_size)


def pack_gated(gate_up: Tensor, bias: Tensor | None) -> PackedWeight:
    """Gate and up, one below the other, as panels that alternate between the two."""
    gate_up, bias = alternate(gate_up, bias)
    return pack(gate_up, bias)


def alternate(gate_up: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows of gate and of up in turns of 16, each padded with zeros to a multiple of 16."""
    size = len(gate_up) // 2
    padded = round_up(size, LANES)

    def order(rows: Tensor) -> Tensor:
        both = torch.zeros(2, padded, *rows.shape[1:], dtype=rows.dtype)
        both[0, :size], both[1, :size] = rows[:size], rows[size:]
        return both.unflatten(1, (-1, LANES)).transpose(0, 1).flatten(0, 2)

    return order(gate_up), None if bias is None else order(bias)


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in memory of their own, in huge pages where the system has them: weights are read from end to end.

    Reading 270 MB in small pages takes about twice as long (two cores of a Xeon 6, 2026-12).
    """
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = mmap.mmap(-1, round_up(max(num_bytes, 1), _HUGE_PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=num_bytes // dtype.itemsize).view(shape)
