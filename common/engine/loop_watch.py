"""Ends a worker whose loop hangs, so that whoever started the worker starts it again.

The loop cannot notice that by itself, and others cannot help: they see a process that is there and says so. So a thread
looks on. It may rely on nothing that the loop could have hung in, the log included.
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from common.engine.turn import Patience, Turn

CHECK_S = 0.5
LEAVE_S = 2.0
"""For the reason to be logged, and for a loop that is let go, as a broken group does, to end the process by itself."""

_ROOT = f"{Path(__file__).parents[2]}{os.sep}"


class LoopWatch:
    """A thread, from `start` to `close`.

    turn:     the loop's, asked in the thread
    limit_s:  how long one may last
    give_up:  called with the reason in a thread of its own, and waited for no longer than LEAVE_S
    """

    def __init__(self, turn: Callable[[], Turn], limit_s: float, give_up: Callable[[str], None]) -> None:
        self._turn = turn
        self._limit_s = limit_s
        self._give_up = give_up
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()

    def _run(self) -> None:
        patience = Patience(CHECK_S)
        while not self._is_closing.wait(CHECK_S):
            turn = self._turn()
            seen_s = patience.see(turn)
            if seen_s > self._limit_s:
                self._end(f"{turn} has run for {seen_s:.0f} s{_place_of_main_thread()}: it hangs, so this worker ends")
                return

    def _end(self, reason: str) -> None:
        threading.Thread(target=self._give_up, args=(reason,), name="last words", daemon=True).start()
        threading.main_thread().join(LEAVE_S)
        os._exit(1)


def _place_of_main_thread() -> str:
    """The innermost function of ours that it is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and not frame.f_code.co_filename.startswith(_ROOT):
        frame = frame.f_back
    return f" in {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else ""
