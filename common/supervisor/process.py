"""One child process: its log file, its end of the channel, its end."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from common.supervisor.channel import Event, decode_event

_MAX_TAIL_BYTES = 64 * 1024


class ChildProcess:
    """A running child. Its standard output and error go to the end of a log file; it has no standard input.

    Where the log cannot be opened (a full disk, a folder that is gone) the child runs without one.
    It leads a session of its own, so that the terminal's Ctrl-C reaches only the supervisor, which then ends it.
    `channel` is readable (never blocking) whenever events or the child's end are there to be read.
    Raises: OSError when the system has no room for a process.
    """

    def __init__(self, argv: Sequence[str], environ: dict[str, str], log_path: Path) -> None:
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        self._received = b""
        self._log_path = log_path
        try:
            with theirs, _open_log(log_path) as log:
                self._log_start = log.tell()
                fd = theirs.fileno()
                self._process = subprocess.Popen(
                    [*argv, f"--supervisor-fd={fd}"],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[fd],
                    start_new_session=True,
                )
        except BaseException:
            self.channel.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_open(self) -> bool:
        """The channel was not closed yet, by its owner."""
        return self.channel.fileno() != -1

    def read_events(self) -> list[Event] | None:
        """Events that have come in; None once the child closed its end. Raises: WireError."""
        try:
            data = self.channel.recv(65536)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            return None
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [decode_event(line) for line in lines]

    def poll(self) -> int | None:
        """The exit code if the child has ended, else None. Never blocks."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask the child to end. Harmless when it has ended."""
        self._process.terminate()

    def kill(self) -> None:
        """End the child and whatever it started in its session, and reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def last_lines(self, num_lines: int) -> list[str]:
        """The end of what this child wrote, earlier children's lines in the same file left out."""
        try:
            with self._log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _MAX_TAIL_BYTES))
                tail = log.read(_MAX_TAIL_BYTES).replace(b"\0", b"")  # where bytes were lost
                return tail.decode(errors="replace").splitlines()[-num_lines:]
        except OSError as error:
            return [f"(its log cannot be read: {error.strerror})"]


def _open_log(path: Path) -> BinaryIO:
    try:
        return path.open("ab")
    except OSError:
        return open(os.devnull, "ab")
