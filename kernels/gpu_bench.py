"""Times of single ops on a GPU: `python -m kernels.bench --device cuda --help`.

A sample is the time between two events that the GPU reaches before and after the op. Before each of them a buffer is
overwritten that is larger than every cache: nothing of what the op reads is there then, and while the buffer is written
the host has the time to launch the op, so launches do not count unless an op is many kernels or waits for one.
"""

# pyright: basic

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kernels.bench_sizes import Sizes, add_sizes, sizes_of
from kernels.composed import ComposedOps, SmallOps
from kernels.cpu.cores import private_cores
from kernels.dispatch import OpsRequest, choose_ops
from kernels.gpu_cases import BLOCK_SIZE, CASES, Setup
from kernels.quantised_linear import BITS
from kernels.work import Peaks, Work, peaks_of

Timer = Callable[[Callable[[], object]], Sequence[float]]
"""Runs something again and again; returns what each run took, in seconds."""

LLAMA_3_8B = Sizes(hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256, rows=64, context=4096)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_FLUSHED_BYTES = 2**30
"""Many times every L2 cache; written in some 0.2 ms at 5 TB/s, and in more on all that is slower."""
_NUM_WARMUPS = 5
_WIDTH_OF_A_PIPE = 130


class CudaTimer:
    """A `Timer`, on the current stream of a device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device = device
        self._repeats = repeats
        self._flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device)

    def __call__(self, run: Callable[[], object]) -> Sequence[float]:
        for _ in range(_NUM_WARMUPS):
            run()
        starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(self._repeats)] for _ in range(2))
        torch.cuda.synchronize(self._device)
        for start, end in zip(starts, ends, strict=True):
            self._flushed.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) / 1e3 for start, end in zip(starts, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class Timing:
    """Of an op by one kind of kernels. roofline_s, torch_s: the least it could take, and PyTorch's own, if known."""

    op: str
    case: str
    kernels: str
    times_s: Sequence[float]
    work: Work
    roofline_s: float | None
    torch_s: float | None

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)

    def figures(self) -> dict[str, Any]:
        """As the file has them."""
        return {
            "op": self.op,
            "case": self.case,
            "kernels": self.kernels,
            "median_us": self.median_s * 1e6,
            "gb_per_s": self.work.num_bytes / self.median_s / 1e9,
            "tflop_per_s": self.work.num_flops / self.median_s / 1e12,
            "share_of_roofline": None if self.roofline_s is None else self.roofline_s / self.median_s,
            "time_to_torchs": None if self.torch_s is None else self.median_s / self.torch_s,
            "work": asdict(self.work),
            "times_us": [each * 1e6 for each in self.times_s],
        }


@torch.inference_mode()
def measure(ops: Sequence[str], setup: Setup, timer: Timer, peaks: Peaks | None) -> Iterator[Timing]:
    """Every case of the ops, by all who can compute it."""
    for op in ops:
        for case in CASES[op](setup):
            itemsize = 4 if op == "sample" else setup.dtype.itemsize
            roofline_s = None if peaks is None else peaks.roofline_s(case.work, itemsize)
            times_s = {name: timer(run) for name, run in case.runs.items()}
            torch_s = statistics.median(times_s["torch"]) if "torch" in times_s else None
            for name, each in times_s.items():
                yield Timing(op, case.what, name, each, case.work, roofline_s, torch_s)


def make_setup(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Setup:
    """Raises: ValueError when there are no Triton ops for this."""

    def small(quantization: str) -> SmallOps:
        request = OpsRequest(
            dtype=dtype, head_dim=sizes.head_dim, block_size=BLOCK_SIZE, device=device, quantization=quantization
        )
        ops = choose_ops("triton", request, private_cores(1))
        assert isinstance(ops, ComposedOps)
        return ops.small

    return Setup(sizes, dtype, device, small("none"), {quantization: small(quantization) for quantization in BITS})


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """rows: figures of timings."""
    table = Table(title=title, title_justify="left")
    for name in ("op", "case", "kernels"):
        table.add_column(name)
    for name in ("median, µs", "GB/s", "TFLOP/s", "of roofline", "time / torch's"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*cells(row))
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=_WIDTH_OF_A_PIPE)).print(table)


def cells(row: Mapping[str, Any]) -> list[str]:
    """Figures of a timing as a reader wants them."""
    share, ratio = row["share_of_roofline"], row["time_to_torchs"]
    return [
        *(row["op"], row["case"], row["kernels"]),
        *(f"{row['median_us']:.1f}", f"{row['gb_per_s']:.0f}", f"{row['tflop_per_s']:.1f}"),
        *("-" if share is None else f"{share:.0%}", "-" if ratio is None else f"{ratio:.2f}"),
    ]


def versions(device: torch.device) -> dict[str, str | None]:
    """Of what computed, and its name."""
    import triton  # an extra, which is there: its ops were chosen

    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def make_parser(device: argparse.ArgumentParser) -> argparse.ArgumentParser:
    description = "Time single ops on a GPU: Triton's, the reference, and PyTorch's own."
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=description, parents=[device])
    parser.add_argument("op", nargs="?", choices=CASES, help="default: all of them")
    add_sizes(parser, LLAMA_3_8B)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--peak-gbps", type=float, help="of the device's memory, GB/s; default: by its name")
    parser.add_argument("--peak-tflops", type=float, help="of its products in this dtype; default: by its name")
    parser.add_argument("--json", type=Path, help="file for every sample")
    return parser


def find_peaks(device_name: str, gbps: float | None, tflops: float | None) -> Peaks | None:
    """What was given, and the rest by the device's name; None: not all is known."""
    known = peaks_of(device_name)
    if gbps is None and tflops is None:
        return known
    gbps = gbps or (known.gbps if known else None)
    if tflops is not None:
        return None if gbps is None else Peaks(gbps, tflops, tflops)
    return None if known is None or gbps is None else Peaks(gbps, known.tflops, known.tflops_fp32)


def main(argv: Sequence[str], device_options: argparse.ArgumentParser) -> int:
    """Defaults are Llama-3.1-8B's sizes. Returns 1 when there is no GPU, or no Triton for it."""
    options = make_parser(device_options).parse_args(argv)
    errors = Console(stderr=True, highlight=False)
    if not torch.cuda.is_available():
        errors.print(f"kernels.bench: error: there is no GPU: PyTorch {torch.__version__} finds none")
        return 1
    device, sizes = torch.device("cuda", torch.cuda.current_device()), sizes_of(options)
    try:
        setup = make_setup(sizes, DTYPES[options.dtype], device)
    except ValueError as error:
        errors.print(f"kernels.bench: error: {error}")
        return 1
    found = versions(device)
    peaks = find_peaks(torch.cuda.get_device_name(device), options.peak_gbps, options.peak_tflops)
    timings = measure([options.op] if options.op else list(CASES), setup, CudaTimer(device, options.repeats), peaks)
    rows = [timing.figures() for timing in timings]
    show(f"{found['device']}, {options.dtype}", rows)
    if options.json:
        peaks_row = None if peaks is None else asdict(peaks)
        kept = {"versions": found, "sizes": asdict(sizes), "dtype": options.dtype, "peaks": peaks_row}
        options.json.write_text(json.dumps(kept | {"timings": rows}))
    return 0
