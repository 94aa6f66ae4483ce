"""What this machine gives to this process."""

import os
from pathlib import Path

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_MEMORY = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


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

    meminfo: the kernel's file;  cgroup: the control group's folder, with `memory.max` and `memory.current`
    """
    available_kb = next(
        int(line.split()[1]) for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")
    )
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), int((cgroup / "memory.current").read_text())
    except OSError:  # no control groups here, or version 1 of them
        return available_kb * 1024
    return available_kb * 1024 if limit == "max" else min(available_kb * 1024, max(0, int(limit) - used))
