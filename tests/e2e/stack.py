"""The real stack as an operator starts it: `baton serve`, real processes, real HTTP."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.front import Front

BATON = Path(__file__).parents[2] / "baton.py"
START_S = 90.0
STOP_S = 10.0


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
        """Of the child with this name (`gateway`, `prefill-0`, `decode-1`, …)."""
        pid = self._find(name)
        assert pid is not None, f"no child is called {name}"
        return pid

    def _find(self, name: str) -> int | None:
        supervisor = self._serve.pid
        for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
            with suppress(FileNotFoundError, ProcessLookupError):  # a child that has ended since
                if f"--name={name}" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    return int(pid)
        return None

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    def wait_until_restarted(self, name: str, old_pid: int) -> None:
        """Another process has this child's name."""
        self.wait_until(lambda: self._find(name) not in (None, old_pid))

    def terminate(self) -> None:
        self._serve.terminate()

    def stop(self) -> int:
        """SIGTERM, if that was not sent; the exit code."""
        self._serve.terminate()
        try:
            return self._serve.wait(STOP_S)
        finally:
            self._serve.close()
