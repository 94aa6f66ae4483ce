"""Cores and memory that a process may use, read from the files of a machine that the test made up."""

import mmap
import os
import platform
import resource
from pathlib import Path

import pytest

from common.machine import num_available_cores, num_free_bytes, touch_pages

GIB = 1024**3


@pytest.mark.parametrize(("cpu_max", "at_most"), [("200000 100000", 2), ("150000 100000", 1), ("20000 100000", 1)])
def test_a_quota_is_whole_cores_and_never_none(tmp_path: Path, cpu_max: str, at_most: int) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(f"{cpu_max}\n")
    assert num_available_cores(file) == min(at_most, len(os.sched_getaffinity(0)))


def test_without_a_quota_all_cores_of_the_affinity_count(tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    file.write_text("max 100000\n")
    cores = len(os.sched_getaffinity(0))
    assert num_available_cores(file) == num_available_cores(tmp_path / "missing") == cores


def make_machine(folder: Path, limit: str, used: int, reclaimable: int) -> tuple[Path, Path]:
    """meminfo of a machine with 8 GiB available, and a control group's folder."""
    meminfo = folder / "meminfo"
    meminfo.write_text(f"MemTotal:  99 kB\nMemAvailable: {8 * GIB // 1024} kB\nHugePages_Total:  0\n")
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\nactive_file 2\ninactive_file {reclaimable}\n")
    return meminfo, folder


@pytest.mark.parametrize(
    ("limit", "used", "reclaimable", "free"),
    [
        pytest.param("max", 3 * GIB, 0, 8 * GIB, id="no limit"),
        pytest.param(f"{4 * GIB}", 3 * GIB, 0, 1 * GIB, id="less than the machine has"),
        pytest.param(f"{4 * GIB}", 4 * GIB, 3 * GIB, 3 * GIB, id="weights that were read can be read again"),
        pytest.param(f"{64 * GIB}", 3 * GIB, 0, 8 * GIB, id="more than the machine has"),
        pytest.param(f"{2 * GIB}", 3 * GIB, 0, 0, id="a limit that was lowered"),
    ],
)
def test_free_memory_is_the_machines_less_by_the_containers_limit(
    tmp_path: Path, limit: str, used: int, reclaimable: int, free: int
) -> None:
    assert num_free_bytes(*make_machine(tmp_path, limit, used, reclaimable)) == free


def test_without_control_groups_all_that_is_available_counts(tmp_path: Path) -> None:
    meminfo, _ = make_machine(tmp_path, "max", 0, 0)
    assert num_free_bytes(meminfo, tmp_path / "missing") == 8 * GIB


def test_this_machine_can_be_read() -> None:
    assert num_available_cores() >= 1
    assert num_free_bytes() > 0


@pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (5, 14),
    reason="this kernel gives pages at their first use only",
)
def test_memory_that_was_touched_is_there_at_its_first_use() -> None:
    memory = mmap.mmap(-1, 20 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:4] = b"kept"
    touch_pages(memoryview(memory))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for page in range(mmap.PAGESIZE, len(memory), mmap.PAGESIZE):
        memory[page] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100  # of 5,120 pages
    assert memory[:4] == b"kept"
