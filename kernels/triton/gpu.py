"""What a launcher has to know of the GPU."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from kernels.triton.tiles import TILES

FEW_ROWS = 16
"""What a product takes at a time: linears read their weights faster if they have no more."""


class Options(TypedDict):
    """How Triton compiles a kernel. num_stages: tiles that are on their way from memory at a time."""

    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """family: what tiles are chosen for, by the names of tiles.py;  num_processors: SMs, or AMD's compute units."""

    family: str
    num_processors: int

    def tile(self, op: str) -> tuple[Mapping[str, int], Options]:
        """Sizes of the op's tiles, as its kernel names them, and how to compile it."""
        tile = TILES[op][self.family]
        return tile.sizes, Options(num_warps=tile.num_warps, num_stages=tile.num_stages)

    def attention_tile(self, op: str, q: Tensor) -> tuple[Mapping[str, int], Options]:
        """The same, for queries like q: [..., head_dim]."""
        if q.dtype == torch.float32:
            return self.tile(f"{op}_fp32")
        return self.tile(f"{op}_wide" if q.shape[-1] > 128 else op)

    def linear_tile(self, op: str, x: Tensor) -> tuple[Mapping[str, int], Options]:
        """The same, for rows like x: [num_tokens, in_size]."""
        if x.dtype == torch.float32:
            return self.tile(f"{op}_fp32")
        return self.tile(f"{op}_few" if len(x) <= FEW_ROWS else op)


INTERPRETER = Gpu("interpreter", 8)


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU that tensors of this device lie on; the interpreter for the CPU's."""
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    return Gpu(_family(properties), properties.multi_processor_count)


def _family(properties: "torch.cuda._CudaDeviceProperties") -> str:
    """The nearest that there are tiles for, never one with more shared memory."""
    if torch.version.hip:
        return "gfx942" if properties.gcnArchName.startswith("gfx9") else "gfx1100"
    return {8: "sm_80", 9: "sm_90", 10: "sm_100"}.get(properties.major, "sm_80")
