"""A process whose main thread stands still in the middle of a step, while its other threads go on: it has hung.

Nothing in it knows of that: one thread alone is stopped by ptrace, as by a debugger. Where debuggers are not allowed
the test is skipped.
"""

import ctypes
import os
import threading
import time
from pathlib import Path

import pytest

from kernels.cpu.build import LEVELS

NATIVE_LIBRARIES = tuple(f"{level}-" for level in LEVELS)
"""How the files of our own ops are called: they alone let go of Python's lock while they compute."""
DEADLINE_S = 30.0
_CONT, _SEIZE, _INTERRUPT = 7, 0x4206, 0x4207
_WALL = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def freeze_in_native_op(pid: int) -> None:
    """Return once its main thread is stopped in one of our native ops, where it holds no lock that others want.

    It stays so until the process ends. A thread waits for that, since only then its parent is told.
    """
    if _ptrace(_SEIZE, pid) != 0:
        pytest.skip(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert _ptrace(_INTERRUPT, pid) == 0
        os.waitpid(pid, _WALL)
        if _is_in_native_op(pid):
            threading.Thread(target=_wait_for_end, args=(pid,), daemon=True).start()
            return
        assert _ptrace(_CONT, pid) == 0
        assert time.monotonic() < deadline, f"process {pid} computes nothing"
        threading.Event().wait(0.001)


def _ptrace(request: int, pid: int) -> int:
    return _libc.ptrace(request, pid, None, None)


def _is_in_native_op(pid: int) -> bool:
    *_, counter = Path(f"/proc/{pid}/syscall").read_text().split()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= int(counter, 16) < int(end, 16):
            return Path(line.split(maxsplit=5)[-1]).name.startswith(NATIVE_LIBRARIES)
    return False


def _wait_for_end(pid: int) -> None:
    while not (os.WIFEXITED(status := os.waitpid(pid, _WALL)[1]) or os.WIFSIGNALED(status)):
        pass
