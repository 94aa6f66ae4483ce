"""The real stack as an operator starts it: `baton serve`, real processes, real HTTP."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from kvtransfer.shm import PREFIX
from tests.e2e.front import Front

BATON = Path(__file__).parents[2] / "baton.py"
START_S = 90.0
STOP_S = 10.0


def find_child(parent: int, name: str) -> int | None:
    """The child of a process that was started with this `--name`."""
    children: list[str] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # the parent has ended
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for pid in children:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since, its sisters have not
            if f"--name={name}" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                return int(pid)
    return None


def is_running(pid: int) -> bool:
    """Whether the process is there, and has not ended without being waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(is_so: Callable[[], bool], timeout_s: float) -> None:
    """Ask for what has no other way to be known until it holds."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"not so after {timeout_s} s"
        threading.Event().wait(0.05)


def wait_until_ended(pids: Sequence[int], timeout_s: float) -> None:
    wait_until(lambda: not any(map(is_running, pids)), timeout_s)


def shared_segments(pid: int) -> set[Path]:
    """Files of KV caches in shared memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(name) for line in lines if PREFIX in (name := line.split(maxsplit=5)[-1])}


class Command:
    """A running `baton …`. Its output is read by a thread, so that every wait has a deadline. Close it in any case.

    shown: what was waited through so far
    """

    def __init__(self, *argv: str) -> None:
        self.shown = ""
        self._process = subprocess.Popen(
            [sys.executable, str(BATON), *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, pattern: str, timeout_s: float) -> str:
        """The group of the first match in the output. Fails when it ends without one, or at the deadline."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.shown)):
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                pytest.fail(f"waited for {pattern!r}, got {self.shown!r}")
            self.shown += line
        return found[1]

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> int:
        """The exit code."""
        return self._process.wait(timeout_s)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Stack(Front):
    """A running `baton serve` on free ports."""

    def __init__(self, *options: str, log_dir: Path) -> None:
        self._serve = Command("serve", "--port=0", f"--log-dir={log_dir}", *options)
        try:
            url = self._serve.wait_for(r"Baton is ready at (http://\S+)", START_S)
        except BaseException:
            self.stop()
            raise
        super().__init__(url)

    def pid(self, name: str) -> int:
        """Of the process with this name: a child (`gateway`, `prefill-0`, …), or another rank of one (`decode-1/2`)."""
        pid = self.find(name)
        assert pid is not None, f"no process is called {name}"
        return pid

    def pids(self, worker: str, num_ranks: int) -> list[int]:
        """Of all ranks of a worker."""
        return [self.pid(worker), *(self.pid(f"{worker}/{rank}") for rank in range(1, num_ranks))]

    def find(self, name: str) -> int | None:
        """The same; None: it is not there."""
        worker, is_rank, _ = name.partition("/")
        parent = self.find(worker) if is_rank else self._serve.pid
        return None if parent is None else find_child(parent, name)

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    def wait_until_restarted(self, name: str, old_pid: int) -> None:
        """Another process has this child's name."""
        self.wait_until(lambda: self.find(name) not in (None, old_pid))

    def terminate(self) -> None:
        self._serve.terminate()

    def stop(self) -> int:
        """SIGTERM, if that was not sent; the exit code."""
        self._serve.terminate()
        try:
            return self._serve.wait(STOP_S)
        finally:
            self._serve.close()
