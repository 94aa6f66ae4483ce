"""Ctrl-C: what was measured so far is shown."""

import asyncio
import signal
import sys

INTERRUPTED_EXIT_CODE = 130


def stop_on_interrupt() -> asyncio.Event:
    """Ctrl-C sets it; a second one ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        print("stopping: again to stop at once", file=sys.stderr)  # noqa: T201
        stop.set()

    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    return stop
