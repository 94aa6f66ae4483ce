"""What this machine gives to this process."""

import ctypes
import os
import resource
import sys
from pathlib import Path

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_MEMORY = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_MADV_POPULATE_WRITE = 23
"""Linux 5.14; `mmap` has no name for it."""
_TOUCHED_AT_ONCE = 1 << 23
"""Bytes. Meanwhile the process can map nothing else: with 470 MB at once its start waited a second."""


def num_available_cores(cpu_max: Path = _CGROUP_CPU_MAX) -> int:
    """Cores that this process may use: the machine's, less by affinity and by a container's quota; at least 1.

    cpu_max: the control group's file, `<quota> <period>` or `max <period>`
    """
    num_cores = len(os.sched_getaffinity(0)) if "sched_getaffinity" in os.__dict__ else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
    except OSError:  # no control groups here, or version 1 of them
        return num_cores
    if quota == "max":
        return num_cores
    return max(1, min(num_cores, int(quota) // int(period)))


def num_free_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP_MEMORY) -> int:
    """Memory that this process could still take: what the machine can free up, less by a container's limit.

    Files that the container has read count as used there, weights for instance, but their memory comes back on demand.
    meminfo: the kernel's file;  cgroup: the control group's folder, with `memory.max`, `.current` and `.stat`
    """
    available = _read_counts(meminfo)["MemAvailable:"] * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text()) - _read_counts(cgroup / "memory.stat")["inactive_file"]
    except OSError:  # no control groups here, or version 1 of them
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def max_descriptors() -> int:
    """Files and sockets that this process may have open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def give_back_freed_memory() -> None:
    """What was freed and is still kept by the C library goes back to the system, where the library can do that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def touch_pages(memory: memoryview) -> None:
    """Have the system give all of this memory's pages now, where it can do that, and not one by one at their first use.

    memory: writable, from the start of a page on; what is in it stays
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    madvise = ctypes.CDLL(None).madvise  # without the interpreter's lock, unlike mmap's
    for start in range(0, memory.nbytes, _TOUCHED_AT_ONCE):
        size = min(_TOUCHED_AT_ONCE, memory.nbytes - start)
        madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)


def _read_counts(file: Path) -> dict[str, int]:
    """Of a kernel file with a name and a number in each line."""
    words = (line.split() for line in file.read_text().splitlines())
    return {name: int(number) for name, number, *_ in words}
