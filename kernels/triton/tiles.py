"""Sizes of tiles for each kernel and family of GPUs: a table, so that nothing is tuned while requests wait.

They follow from what the compiler says of registers and shared memory (`python -m kernels.aot --report`), and from
what is known to be good elsewhere; none is measured yet. Families, and what shared memory their tiles may use, are
those of `TARGETS` in kernels/aot.py; `interpreter` has tiles that are small enough for tests to need many of them.
"""

from dataclasses import dataclass, field

NVIDIA = ("sm_80", "sm_90", "sm_100")
AMD = ("gfx942", "gfx1100")
FAMILIES = (*NVIDIA, *AMD, "interpreter")


@dataclass(frozen=True, slots=True)
class Tile:
    """sizes: by the names of the kernel's parameters."""

    num_warps: int = 4
    num_stages: int = 1
    sizes: dict[str, int] = field(default_factory=dict)


def _everywhere(tile: Tile, interpreter: dict[str, int] | None = None) -> dict[str, Tile]:
    return dict.fromkeys(FAMILIES, tile) | {"interpreter": Tile(sizes=interpreter or tile.sizes)}


def _attention(block_m: int | None, nvidia: Tile, amd: Tile) -> dict[str, Tile]:
    """block_m: rows of a tile in the interpreter, where they are chosen."""
    rows = {} if block_m is None else {"BLOCK_M": block_m}
    interpreter = Tile(sizes=rows | {"BLOCK_N": 32})
    return dict.fromkeys(NVIDIA, nvidia) | dict.fromkeys(AMD, amd) | {"interpreter": interpreter}


def _linear(nvidia: Tile, amd: Tile) -> dict[str, Tile]:
    interpreter = Tile(sizes={"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64})
    return dict.fromkeys(NVIDIA, nvidia) | dict.fromkeys(AMD, amd) | {"interpreter": interpreter}


TILES: dict[str, dict[str, Tile]] = {
    "rms_norm": _everywhere(Tile(num_warps=8)),
    "rope_and_cache": _everywhere(Tile(num_warps=1)),
    "gated": _everywhere(Tile(sizes={"BLOCK": 1024}), {"BLOCK": 32}),
    "staging": _everywhere(Tile(sizes={"BLOCK": 2048}), {"BLOCK": 64}),
    "sample": _everywhere(Tile(num_warps=8, sizes={"BLOCK": 4096}), {"BLOCK": 256}),
    "reduce_splits": _everywhere(Tile()),
    "quantised_linear": _linear(
        Tile(num_warps=8, num_stages=3, sizes={"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}),
        Tile(num_warps=8, num_stages=2, sizes={"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}),
    ),
    "quantised_linear_few": _linear(
        Tile(num_warps=4, num_stages=4, sizes={"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64}),
        Tile(num_warps=4, num_stages=2, sizes={"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}),
    ),
    "quantised_linear_fp32": _linear(
        Tile(num_warps=4, num_stages=2, sizes={"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32}),
        Tile(num_warps=4, num_stages=1, sizes={"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32}),
    ),
    "decode_attention": _attention(
        None,
        Tile(num_warps=8, num_stages=3, sizes={"BLOCK_N": 64}),
        Tile(num_warps=4, num_stages=1, sizes={"BLOCK_N": 64}),
    ),
    "decode_attention_wide": _attention(
        None,
        Tile(num_warps=8, num_stages=2, sizes={"BLOCK_N": 32}),
        Tile(num_warps=4, num_stages=1, sizes={"BLOCK_N": 32}),
    ),
    "decode_attention_fp32": _attention(
        None,
        Tile(num_warps=4, num_stages=1, sizes={"BLOCK_N": 16}),
        Tile(num_warps=4, num_stages=1, sizes={"BLOCK_N": 16}),
    ),
    "prefill_attention": _attention(
        32,
        Tile(num_warps=8, num_stages=2, sizes={"BLOCK_M": 128, "BLOCK_N": 64}),
        Tile(num_warps=8, num_stages=1, sizes={"BLOCK_M": 128, "BLOCK_N": 32}),
    ),
    "prefill_attention_wide": _attention(
        32,
        Tile(num_warps=8, num_stages=1, sizes={"BLOCK_M": 128, "BLOCK_N": 32}),
        Tile(num_warps=8, num_stages=1, sizes={"BLOCK_M": 64, "BLOCK_N": 16}),
    ),
    "prefill_attention_fp32": _attention(
        32,
        Tile(num_warps=8, num_stages=1, sizes={"BLOCK_M": 32, "BLOCK_N": 16}),
        Tile(num_warps=8, num_stages=1, sizes={"BLOCK_M": 32, "BLOCK_N": 16}),
    ),
}
"""An op's tiles by family.

Attention has `_wide` ones for head_dims over 128, linears have `_few` for few rows. Both have others for fp32, which is
multiplied without the units for products: it is there to be exact.
"""
