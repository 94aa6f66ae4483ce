"""How the ranks of a group know of each other's end: a broken log at once, a frozen process by its silence."""

import logging
import os
import select
import signal
import threading
from collections.abc import Callable

from common.engine.rank_channel import RankEnd
from kernels.cpu.group_memory import GroupMemory

logger = logging.getLogger(__name__)

BEAT_S = 0.25
SILENT_S = 1.5
"""A rank that did not say for so long that it lives is taken for dead."""
LEAVE_S = 1.0
"""From the end of its group to the end of a rank, whatever it is stuck in."""


class RankWatch:
    """A thread that says that this rank lives, and ends it when rank 0 is gone or silent.

    has_begun:   rank 0 has loaded its own shard, and speaks; before that it may be silent
    has_ended:   this rank is being ended, so nothing that fails in it is a failure
    is_healthy:  whether this rank can go on, besides its main thread; asked several times a second

    The main thread may be in the middle of a step, which it leaves when the group is aborted, or still be loading:
    SIGTERM unwinds it.
    """

    def __init__(self, channel: RankEnd, memory: GroupMemory, rank: int) -> None:
        self._channel = channel
        self._memory = memory
        self._rank = rank
        self.has_begun = False
        self.has_ended = False
        self.is_healthy: Callable[[], bool] = lambda: True
        threading.Thread(target=self._run, name="rank watch", daemon=True).start()

    def _run(self) -> None:
        hang_up = select.poll()
        hang_up.register(self._channel.fileno, select.POLLRDHUP)
        while not hang_up.poll(BEAT_S * 1000):
            self._memory.beat(self._rank)
            if not self.is_healthy():
                logger.error("a thread of this rank has died, see the log above")
                break
            if self.has_begun and 0 in self._memory.silent_ranks(SILENT_S):
                logger.error("rank 0 was silent for %s s", SILENT_S)
                break
        self.has_ended = True
        self._memory.abort()
        self._channel.hang_up()
        threading.main_thread().join(LEAVE_S / 2)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.main_thread().join(LEAVE_S / 2)
        os._exit(1)
