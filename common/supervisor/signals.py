"""Signals as bytes on a socket, so that one selector waits for them and for everything else."""

import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


@contextmanager
def signal_socket() -> Generator[socket.socket]:
    """While in the context, each stop signal and each child's death makes one byte, its number, readable.

    Main thread only. A hang-up that whoever started us ignores (nohup) stays ignored.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    handled = STOP_SIGNALS | {signal.SIGCHLD}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        handled -= {signal.SIGHUP}
    with ours, theirs:
        wakeup_before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        handlers_before = {number: signal.signal(number, _let_wakeup_fd_tell) for number in handled}
        try:
            yield ours
        finally:
            for number, handler in handlers_before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup_before)


def read_signals(wakeup: socket.socket) -> list[signal.Signals]:
    """The signals that came since the last call. Never blocks."""
    try:
        return [signal.Signals(number) for number in wakeup.recv(4096)]
    except BlockingIOError:
        return []


def _let_wakeup_fd_tell(number: int, frame: FrameType | None) -> None:
    """Python writes to the wake-up descriptor only for signals that have a handler."""
