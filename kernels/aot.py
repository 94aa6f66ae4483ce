"""Triton's kernels compiled ahead of time, for GPUs that need not be there: `python -m kernels.aot --help`.

Every case calls a launcher with tensors that have a shape and no memory; what it would have launched is compiled as
it is, for each family of GPUs with the tiles of its own, and the compiler's figures are read out of the result. Triton
keeps results in its cache, so that a second run takes seconds.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from rich.console import Console
from rich.progress import track
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from kernels.aot_cases import CASES, Case
from kernels.triton.gpu import Gpu

_ALIGNMENT = 16
"""What Triton is told of integers and addresses that are multiples of it."""
_SIZES = ("BLOCK", "BLOCK_M", "BLOCK_N", "BLOCK_K")
"""Of tiles, as far as the report shows them."""
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class Target:
    """shared_bytes: that a program may have on every GPU of the family;  may_spill: spills are shown, no failure."""

    gpu: Gpu
    compiler: GPUTarget
    shared_bytes: int
    may_spill: bool


# sm_80 stands for sm_86 and sm_89 as well, which have less shared memory than it has.
# Source: CUDA C++ Programming Guide, compute capabilities; AMD's LDS is 64 KB a workgroup. Counts of processors are
# those of A100, H200, B200, MI300X and RX 7900 XTX: they only have a say in the number of splits.
TARGETS = {
    "sm_80": Target(Gpu("sm_80", 108), GPUTarget("cuda", 80, 32), 99 * 1024, True),
    "sm_90": Target(Gpu("sm_90", 132), GPUTarget("cuda", 90, 32), 227 * 1024, False),
    "sm_100": Target(Gpu("sm_100", 148), GPUTarget("cuda", 100, 32), 227 * 1024, True),
    "gfx942": Target(Gpu("gfx942", 304), GPUTarget("hip", "gfx942", 64), 64 * 1024, False),
    "gfx1100": Target(Gpu("gfx1100", 96), GPUTarget("hip", "gfx1100", 32), 64 * 1024, True),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher asked Triton for. arguments: by name;  options: num_warps and num_stages."""

    kernel: JITFunction
    arguments: Mapping[str, Any]
    options: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Resources:
    """Of a thread: vector registers, and what is spilled, bytes on NVIDIA and registers on AMD; and of a program."""

    registers: int
    spills: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report."""

    kernel: str
    case: str
    target: str
    options: Mapping[str, int]
    resources: Resources

    @property
    def failure(self) -> str | None:
        target = TARGETS[self.target]
        if self.resources.shared_bytes > target.shared_bytes:
            return f"{self.resources.shared_bytes} bytes of shared memory, {self.target} has {target.shared_bytes}"
        if self.resources.spills and not target.may_spill:
            return f"{self.resources.spills} spilled"
        return None


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches are taken down and not done."""
    launches: list[Launch] = []

    def run(kernel: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages")}
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        launches.append(Launch(kernel, arguments, options))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def launches_of(case: Case, gpu: Gpu) -> list[Launch]:
    with recorded() as launches:
        case.run(gpu)
    return launches


def compile_launch(launch: Launch, target: Target) -> CompiledKernel:
    """As Triton would compile it for the first launch with such arguments."""
    signature, constants, attributes = {}, {}, {}
    for index, param in enumerate(launch.kernel.params):
        value = launch.arguments[param.name]
        is_special = isinstance(value, int) and not param.do_not_specialize
        if param.is_constexpr or value is None or (is_special and value == 1):
            signature[param.name], constants[(index,)] = "constexpr", value
            continue
        signature[param.name] = _type_of(value)
        if isinstance(value, Tensor) or (is_special and value % _ALIGNMENT == 0):
            attributes[(index,)] = [["tt.divisibility", _ALIGNMENT]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=target.compiler, options=dict(launch.options))


def _type_of(value: object) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float), f"a kernel's argument is {value!r}"
    return "fp32"


def resources_of(compiled: CompiledKernel, target: Target) -> Resources:
    if target.compiler.backend == "cuda":
        return _cuda_resources(compiled)
    assembly = compiled.asm["amdgcn"]
    numbers = {
        name: int(value)
        for name, value in re.findall(r"^\s*\.((?:vgpr|sgpr|agpr)_(?:spill_)?count):\s*(\d+)", assembly, re.MULTILINE)
    }
    spills = numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"]
    return Resources(numbers["vgpr_count"], spills, compiled.metadata.shared)


def _cuda_resources(compiled: CompiledKernel) -> Resources:
    """A thread's stack: these kernels have nothing to put there but what is spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [_cuobjdump(), "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Resources(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], compiled.metadata.shared)


def _cuobjdump() -> str:
    """Triton brings it."""
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def compile_cases(cases: Sequence[Case], targets: Sequence[str]) -> Iterator[Row]:
    for case in cases:
        for name in targets:
            target = TARGETS[name]
            for launch in launches_of(case, target.gpu):
                resources = resources_of(compile_launch(launch, target), target)
                kernel = launch.kernel.__name__.removesuffix("_kernel")
                sizes = {key: launch.arguments[key] for key in _SIZES if key in launch.arguments}
                yield Row(kernel, case.name, name, sizes | dict(launch.options), resources)


def show(rows: Sequence[Row], print_line: Callable[[str], None]) -> None:
    """As a table in Markdown."""
    print_line("| kernel | case | target | tile | registers | spills | shared memory, bytes |")
    print_line("|---|---|---|---|---:|---:|---:|")
    for row in rows:
        tile = ", ".join(f"{name.removeprefix('num_')} {value}" for name, value in row.options.items())
        found = row.resources
        numbers = f"{found.registers} | {found.spills} | {found.shared_bytes}"
        print_line(f"| {row.kernel} | {row.case} | {row.target} | {tile} | {numbers} |")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 where a kernel cannot be launched on its target, or spills where it must not."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.aot", description="Compile Triton's kernels, without a GPU."
    )
    parser.add_argument("--report", action="store_true", help="print a table of registers, spills and shared memory")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--cases", nargs="+", default=[""], help="only those whose name has one of these in it")
    options = parser.parse_args(argv)
    cases = [case for case in CASES if any(part in case.name for part in options.cases)]
    console = Console(stderr=True, highlight=False)
    tracked = track(cases, "compiling", console=console, disable=not console.is_terminal)
    rows = [row for case in tracked for row in compile_cases([case], options.targets)]
    if options.report:
        show(rows, lambda line: print(line, file=sys.stdout))  # noqa: T201
    failures = [row for row in rows if row.failure]
    for row in failures:
        console.print(f"kernels.aot: {row.kernel}, {row.case}, {row.target}: {row.failure}", soft_wrap=True)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
