"""Times of single ops on cores: `python -m kernels.bench --help`.

What an op reads is there as often as it takes to be larger than a core's caches, and used in turn, since a step reads
all layers before it comes back to the first. The caches of keys and values are filled with random values.
"""

# pyright: basic

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kernels.bench_sizes import Sizes, add_sizes, sizes_of
from kernels.blocks import AttentionWeights, LinearWeight, MLPWeights, NormWeight
from kernels.composed import ComposedOps
from kernels.cpu.cores import private_cores
from kernels.cpu.library import NoNativeOps, usable_levels
from kernels.cpu.memory import HugeMemory
from kernels.cpu.ops import CpuOps
from kernels.dispatch import Ops
from kernels.paged_kv import LayerKV, values_per_word
from kernels.token_rows import DecodeRows, TokenRows

_COLD_BYTES = 256 * 2**20
"""Of all copies of what one op reads together."""
_NUM_WARMUPS = 3
_WIDTH_OF_A_PIPE = 120
_WEIGHT_BYTES = {"int8": 1.125, "int4": 0.625}
"""With a scale and an offset in fp16 for 32 weights."""
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Timing:
    """num_bytes: of weights, KV or logits, that must be read;  num_flops: a multiplication and an addition are two."""

    op: str
    kernels: str
    times_s: Sequence[float]
    num_bytes: float
    num_flops: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)


class Bench:
    """Times the ops of one kind of kernels."""

    def __init__(self, name: str, ops: Ops, sizes: Sizes, dtype: torch.dtype, quantization: str, repeats: int) -> None:
        self._name = name
        self._ops = ops
        self._sizes = sizes
        self._dtype = dtype
        self._weight_bytes = _WEIGHT_BYTES.get(quantization, dtype.itemsize)
        self._head_bytes = dtype.itemsize if quantization == "none" else _WEIGHT_BYTES["int8"]
        self._repeats = repeats

    def run(self) -> list[Timing]:
        return [self._attention(), self._mlp(), self._head(), self._argmax()]

    def _attention(self) -> Timing:
        s = self._sizes
        num_weights = s.hidden * (2 * s.heads + 2 * s.kv_heads) * s.head_dim
        rows, num_blocks = _decode_rows(s.rows, s.context)
        kv_bytes = 2 * s.rows * s.context * s.kv_heads * s.head_dim * self._dtype.itemsize
        cos_sin = torch.randn(s.context, s.head_dim)

        def make() -> Callable[[Tensor, Tensor], object]:
            block = self._ops.attention(
                AttentionWeights(
                    norm=self._norm(),
                    qkv=self._linear((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
                    out=self._linear(s.hidden, s.heads * s.head_dim),
                    cos_sin=cos_sin,
                    num_heads=s.heads,
                    num_kv_heads=s.kv_heads,
                    head_dim=s.head_dim,
                )
            )
            kv = _random_kv(num_blocks, s, self._dtype)
            return lambda x, residual: block(x, residual, rows, kv)

        num_flops = 2 * s.rows * num_weights + 4 * s.rows * s.context * s.heads * s.head_dim
        return self._time("attention", make, num_weights * self._weight_bytes + kv_bytes, num_flops)

    def _mlp(self) -> Timing:
        s = self._sizes
        num_weights = 3 * s.hidden * s.mlp

        def make() -> Callable[[Tensor, Tensor], object]:
            gate_up, down = self._linear(2 * s.mlp, s.hidden), self._linear(s.hidden, s.mlp)
            return self._ops.mlp(MLPWeights(self._norm(), gate_up, down))

        return self._time("mlp", make, num_weights * self._weight_bytes, 2 * s.rows * num_weights)

    def _head(self) -> Timing:
        s = self._sizes
        num_weights = s.vocab * s.hidden

        def make() -> Callable[[Tensor, Tensor], object]:
            return self._ops.head(self._norm(), self._linear(s.vocab, s.hidden))

        return self._time("head", make, num_weights * self._head_bytes, 2 * s.rows * num_weights)

    def _argmax(self) -> Timing:
        s = self._sizes

        def make() -> Callable[[Tensor, Tensor], object]:
            logits = torch.randn(s.rows, s.vocab)
            return lambda x, residual: self._ops.argmax(logits)

        return self._time("argmax", make, 4 * s.rows * s.vocab, 0)

    def _time(
        self, op: str, make: Callable[[], Callable[[Tensor, Tensor], object]], num_bytes: float, num_flops: float
    ) -> Timing:
        """make: an op with what it reads of its own."""
        shape = self._sizes.rows, self._sizes.hidden
        num_copies = -(-_COLD_BYTES // int(num_bytes))
        blocks = itertools.cycle([make() for _ in range(num_copies)])
        dtype = self._ops.hidden_dtype(self._dtype)
        self._ops.begin_step()
        times_s: list[float] = []
        for _ in range(_NUM_WARMUPS + self._repeats):
            x, residual = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
            block = next(blocks)
            started_s = time.perf_counter()
            block(x, residual)
            times_s.append(time.perf_counter() - started_s)
        self._ops.rest()
        return Timing(op, self._name, times_s[_NUM_WARMUPS:], num_bytes, num_flops)

    def _norm(self) -> NormWeight:
        return NormWeight(torch.ones(self._sizes.hidden, dtype=self._dtype), 1e-5)

    def _linear(self, out_size: int, in_size: int) -> LinearWeight:
        weight = torch.randn(out_size, in_size) / in_size**0.5
        return LinearWeight(weight.to(self._ops.linear_dtype(self._dtype)))


def _decode_rows(num_rows: int, context: int) -> tuple[TokenRows, int]:
    """Sequences of one token each, which share no block. Returns also how many blocks they have."""
    num_blocks = -(-context // _BLOCK_SIZE)
    tables = torch.arange(num_rows * num_blocks, dtype=torch.int32).view(num_rows, num_blocks)
    positions = torch.full((num_rows,), context - 1)
    slots = tables[:, -1].long() * _BLOCK_SIZE + (context - 1) % _BLOCK_SIZE
    lens = torch.full((num_rows,), context, dtype=torch.int32)
    return TokenRows(positions, slots, num_rows, DecodeRows(tables, lens), None), num_rows * num_blocks


def _random_kv(num_blocks: int, sizes: Sizes, dtype: torch.dtype) -> LayerKV:
    """One layer's blocks, keys and values of a head one behind the other, in huge pages as a worker's cache."""
    pair, size = values_per_word(dtype), sizes.head_dim
    shape = (num_blocks, sizes.kv_heads, 2, _BLOCK_SIZE * size)
    blocks = HugeMemory().zeros(shape, dtype).copy_(torch.randn(shape))
    keys = blocks[:, :, 0].unflatten(2, (size // pair, _BLOCK_SIZE, pair))
    return LayerKV(keys, blocks[:, :, 1].unflatten(2, (_BLOCK_SIZE // pair, size, pair)))


@torch.inference_mode()
def measure(sizes: Sizes, dtype: torch.dtype, quantization: str, num_cores: int, repeats: int) -> list[Timing]:
    """On every instruction level of this machine, and by the reference, where these can do what is asked."""
    timings: list[Timing] = []
    torch.set_num_threads(1)  # as in a worker: native ops bring their own
    for level in usable_levels():
        cores = private_cores(num_cores)
        ops = CpuOps(*(dtype, sizes.head_dim, _BLOCK_SIZE, cores), quantization=quantization, level=level)
        timings += Bench(level, ops, sizes, dtype, quantization, repeats).run()
    if quantization == "none":
        torch.set_num_threads(num_cores)
        timings += Bench("reference", ComposedOps(), sizes, dtype, quantization, repeats).run()
    return timings


def show(sizes: Sizes, timings: Sequence[Timing]) -> None:
    table = Table(title=f"{sizes.rows} rows, context {sizes.context}", title_justify="left")
    for name in ("op", "kernels"):
        table.add_column(name)
    for name in ("median, µs", "min", "max", "GB/s", "GFLOP/s", "repeats"):
        table.add_column(name, justify="right")
    for timing in sorted(timings, key=lambda timing: ("attention", "mlp", "head", "argmax").index(timing.op)):
        times_us = [1e6 * each for each in (timing.median_s, min(timing.times_s), max(timing.times_s))]
        rates = timing.num_bytes / timing.median_s / 1e9, timing.num_flops / timing.median_s / 1e9
        table.add_row(
            *(timing.op, timing.kernels, *(f"{each:.0f}" for each in times_us)),
            *(f"{rates[0]:.1f}", f"{rates[1]:.0f}", str(len(timing.times_s))),
        )
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=_WIDTH_OF_A_PIPE)).print(table)


def main(argv: Sequence[str], device: argparse.ArgumentParser) -> int:
    """Defaults are SmolLM2-135M's sizes. Returns 1 when the kernels cannot do what is asked."""
    description = "Time single ops, or with all_reduce as the first argument what groups of ranks exchange."
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=description, parents=[device])
    defaults = Sizes(hidden=576, heads=9, kv_heads=3, head_dim=64, mlp=1536, vocab=49152, rows=8, context=512)
    add_sizes(parser, defaults)
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, help="file for every sample")
    options = parser.parse_args(argv)
    sizes = sizes_of(options)
    try:
        timings = measure(sizes, _DTYPES[options.dtype], options.quantization, options.cores, options.repeats)
    except NoNativeOps as error:
        Console(stderr=True, highlight=False).print(f"kernels.bench: error: {error}")
        return 1
    show(sizes, timings)
    if options.json:
        options.json.write_text(json.dumps({"sizes": asdict(sizes), "timings": [asdict(each) for each in timings]}))
    return 0
