"""All that needs a GPU, in one go: `make gpu-check`. Tests in parts, each with a time limit, then times of single ops.

It installs nothing and needs no network; what is missing is named. Its two files, `gpu-check.json` and `gpu-check.md`,
are there whatever fails, and are written anew after each part.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from kernels.gpu_bench import cells
from kernels.gpu_cases import CASES

ROOT = Path(__file__).parents[2]
TESTS = {
    "kernels": ("tests/kernels/triton", 150),
    "runner and blocks": ("tests/gpu/test_runner.py tests/gpu/test_blocks.py", 90),
    "stack": ("tests/gpu/test_stack.py", 90),
}
"""Each with its limit in seconds."""
BENCH_S = 120
"""Of all ops together: with the limits above, 450 s in all."""
NUM_PROCESSES = 8
"""For kernels, which take most of their time to compile; where pytest-xdist is there."""
TAIL_CHARS = 4000
_NOT_OK = ("failures", "errors", "skipped")


@dataclass(frozen=True, slots=True)
class Part:
    """What came of one. counts, properties: of tests;  timings: figures of ops;  tail: of what a failed one said."""

    name: str
    is_ok: bool
    duration_s: float
    counts: dict[str, int] = field(default_factory=dict[str, int])
    properties: dict[str, str] = field(default_factory=dict[str, str])
    timings: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tail: str = ""


def requirements(pyproject: str) -> list[str]:
    """Names of the packages that the parts need."""
    project = tomllib.loads(pyproject)["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["gpu"], "pytest"]
    return [name.partition(">")[0].partition("=")[0].strip() for name in wanted]


def find_versions(names: Sequence[str]) -> dict[str, str | None]:
    """None: it is missing."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in names}


def device_name() -> str | None:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def run(command: Sequence[str], limit_s: float) -> tuple[bool, float, str]:
    """Whether it ended well and in time, how long it took, and the end of what it said. Ends what it started."""
    started_s = time.monotonic()
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1"}
    try:
        # A process group of its own, so that a stack which hangs goes with its test.
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        ) as process:
            try:
                said, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                said = f"{process.communicate()[0]}\nended after its limit of {limit_s:.0f} s"
    except OSError as error:
        return False, time.monotonic() - started_s, str(error)
    return process.returncode == 0, time.monotonic() - started_s, said[-TAIL_CHARS:]


def run_tests(name: str, out: Path) -> Part:
    paths, limit_s = TESTS[name]
    results = out / "results.xml"
    results.unlink(missing_ok=True)
    several = ["-n", str(NUM_PROCESSES)] if name == "kernels" and importlib.util.find_spec("xdist") else []
    # What other versions than ours warn of is shown and fails nothing.
    command = [*("-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-rs", f"--junitxml={results}"), *several]
    is_ok, duration_s, tail = run([sys.executable, *command, *paths.split()], limit_s)
    counts, properties = read_results(results.read_text()) if results.exists() else ({}, {})
    results.unlink(missing_ok=True)
    is_ok = is_ok and counts.get("passed", 0) > 0
    return Part(name, is_ok, duration_s, counts, properties, tail="" if is_ok else tail)


def read_results(xml: str) -> tuple[dict[str, int], dict[str, str]]:
    """Numbers of tests by what came of them, and what tests noted."""
    root = ElementTree.fromstring(xml)
    numbers = {name: sum(int(suite.get(name, 0)) for suite in root.iter("testsuite")) for name in ("tests", *_NOT_OK)}
    passed = numbers.pop("tests") - sum(numbers.values())
    noted = {each.get("name", ""): each.get("value", "") for each in root.iter("property")}
    return {"passed": passed, **numbers}, noted


def run_benches(out: Path) -> Iterator[Part]:
    """One process an op, since a GPU that an op has broken computes nothing more in that process."""
    left_s = float(BENCH_S)
    for op in CASES:
        figures = out / "op.json"
        figures.unlink(missing_ok=True)
        command = [sys.executable, "-m", "kernels.bench", "--device", "cuda", op, f"--json={figures}"]
        is_ok, duration_s, tail = run(command, max(1.0, left_s))
        left_s -= duration_s
        timings = json.loads(figures.read_text())["timings"] if figures.exists() else []
        figures.unlink(missing_ok=True)
        yield Part(f"bench {op}", is_ok, duration_s, timings=timings, tail="" if is_ok else tail)


def run_parts(out: Path) -> Iterator[Part]:
    for name in TESTS:
        yield run_tests(name, out)
    yield from run_benches(out)


def as_markdown(device: str | None, versions: dict[str, str | None], parts: Sequence[Part]) -> str:
    lines = [f"# {device or 'No GPU'}", "", f"PyTorch {torch.__version__}, Triton {versions['triton']}.", ""]
    if missing := [name for name, version in versions.items() if version is None]:
        lines += [f"Missing: {', '.join(missing)}.", ""]
    lines += ["| part | result | s | tests |", "|---|---|--:|---|"]
    for part in parts:
        counts = ", ".join(f"{number} {name}" for name, number in part.counts.items())
        lines.append(f"| {part.name} | {'ok' if part.is_ok else 'FAILED'} | {part.duration_s:.0f} | {counts} |")
    lines += ["", "| op | case | kernels | µs | GB/s | TFLOP/s | of roofline | time / torch's |"]
    lines.append("|---|---|---|--:|--:|--:|--:|--:|")
    lines += [f"| {' | '.join(cells(row))} |" for part in parts for row in part.timings]
    for part in parts:
        lines += ["", *(f"{name}: {value}" for name, value in part.properties.items())] if part.properties else []
        lines += ["", f"## {part.name} failed", "", "```", part.tail, "```"] if not part.is_ok else []
    return "\n".join(lines) + "\n"


def write(out: Path, device: str | None, versions: dict[str, str | None], parts: Sequence[Part]) -> None:
    platform = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    kept = {"device": device, **platform, "hip": torch.version.hip, "versions": versions}
    (out / "gpu-check.json").write_text(json.dumps(kept | {"parts": [asdict(part) for part in parts]}, indent=1))
    (out / "gpu-check.md").write_text(as_markdown(device, versions, parts))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    """Returns 1 when there is no GPU, or a part failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description="Run all that needs a GPU.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check", help="folder for the two files")
    out: Path = parser.parse_args(argv).out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    device = device_name()
    versions = find_versions([*requirements((ROOT / "pyproject.toml").read_text()), "transformers", "pytest-xdist"])
    parts: list[Part] = []
    write(out, device, versions, parts)
    if missing := [name for name, version in versions.items() if version is None]:
        say(f"missing, so what needs it fails or is skipped: {', '.join(missing)}")
    if device is None:
        say(f"there is no GPU: PyTorch {torch.__version__} finds none")
        return 1
    say(device)
    for part in run_parts(out):
        parts.append(part)
        write(out, device, versions, parts)
        say(f"{part.name}: {'ok' if part.is_ok else 'FAILED'}, {part.duration_s:.0f} s\n{part.tail}")
    say(f"{out}/gpu-check.md")
    return 0 if all(part.is_ok for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
