"""Rank 0 of a group without a model: `python -m tests.service.fake_rank_0` prints its ranks' pids and does nothing.

With `hang` it waits for a rank that hangs and lives, as a loop does that somebody looks at.
"""

import os
import sys
import threading
from contextlib import closing

from common.engine.loop_watch import LoopWatch
from common.engine.rank_channel import Applied, Join, Rest, Transfer
from common.engine.turn import Turn
from common.engine.worker_group import WorkerGroup
from common.errors import GroupFailed
from tests.service import fake_rank


def start_group(environ: dict[str, str]) -> WorkerGroup:
    return WorkerGroup(
        fake_rank.SIZE,
        lambda rank, fd: [sys.executable, "-m", fake_rank.__name__, str(fd)],
        lambda rank, fd: Join(rank, "worker#1", 10, fd, 0),
        environ,
    )


def main(hangs: bool) -> str:
    with closing(start_group(dict(os.environ))) as group:
        pids = b" ".join(group.wait_until_ready())
        group.log(Rest())
        sys.stdout.write(pids.decode() + "\n")
        sys.stdout.flush()
        if not hangs:
            threading.Event().wait()
        LoopWatch(lambda: Turn(0.0), 1.0, group.break_up).start()
        group.log(Transfer(b"hang 1", is_answered=True))
        try:
            group.collect(Applied)
        except GroupFailed as error:
            return str(error)
    return "nothing has hung"


if __name__ == "__main__":
    sys.exit(main("hang" in sys.argv))
