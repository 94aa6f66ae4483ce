"""How busy the machine is before a run: a figure measured beside other work is worth less."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """load_1min: processes that run or want to.  cpu_busy: share of all cores over a moment; None where unknown."""

    load_1min: float
    cpu_busy: float | None


async def look_at_machine() -> MachineLoad:
    """Takes half a second."""
    before = _cpu_times()
    await asyncio.sleep(_LOOK_S)
    after = _cpu_times()
    return MachineLoad(os.getloadavg()[0], None if before is None or after is None else busy_share(before, after))


def busy_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """before, after: (idle, all) ticks of all cores."""
    num_ticks = after[1] - before[1]
    return 1 - (after[0] - before[0]) / num_ticks if num_ticks else 0.0


def read_cpu_times(stat: str) -> tuple[int, int]:
    """(idle, all) ticks from the text of /proc/stat. Waiting for a disk counts as idle. Source: proc(5)."""
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, stat.split("\n", 1)[0].split()[1:9])
    return idle + iowait, user + nice + system + idle + iowait + irq + softirq + steal


def _cpu_times() -> tuple[int, int] | None:
    try:
        return read_cpu_times(Path("/proc/stat").read_text())
    except FileNotFoundError:  # not Linux
        return None
