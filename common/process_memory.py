"""The memory of every running `baton serve`, process by process: `python -m common.process_memory`, or `make memory`.

It is PSS: what several processes share, such as a KV cache that one reads out of the other's memory, is divided between
them, so that the sum is what the machine has to give.
"""

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

_PROC = Path("/proc")


def find_serves(proc: Path = _PROC) -> Iterator[int]:
    """Process ids of running `baton serve`."""
    for folder in proc.iterdir():
        words = _command_line(folder) if folder.name.isdecimal() else []
        if any(Path(first).stem == "baton" and second == "serve" for first, second in pairwise(words)):
            yield int(folder.name)


def tree_of(pid: int, proc: Path = _PROC) -> Iterator[int]:
    """The process and all its descendants that are there."""
    yield pid
    for task in (proc / str(pid) / "task").glob("*/children"):
        for child in task.read_text().split():
            yield from tree_of(int(child), proc)


def name_of(pid: int, proc: Path = _PROC) -> str:
    """What `baton serve` called it; else the beginning of its command line."""
    words = _command_line(proc / str(pid))
    return next((word.removeprefix("--name=") for word in words if word.startswith("--name=")), " ".join(words)[:60])


def pss_bytes(pid: int, proc: Path = _PROC) -> int:
    lines = (proc / str(pid) / "smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _command_line(folder: Path) -> list[str]:
    try:
        return (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended
        return []


def show() -> str:
    lines: list[str] = []
    for serve in find_serves():
        sizes = {pid: pss_bytes(pid) for pid in tree_of(serve)}
        lines += [f"{size / 1e6:8.0f} MB  {name_of(pid)}" for pid, size in sizes.items()]
        lines.append(f"{sum(sizes.values()) / 1e6:8.0f} MB  together")
    return "\n".join(lines or ["no baton serve is running"])


if __name__ == "__main__":
    sys.stdout.write(show() + "\n")
