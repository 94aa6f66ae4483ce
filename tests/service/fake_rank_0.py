"""Rank 0 of a group without a model: `python -m tests.service.fake_rank_0` prints its ranks' pids and does nothing."""

import os
import sys
import threading

from common.engine.rank_channel import Join, Rest
from common.engine.worker_group import WorkerGroup
from tests.service import fake_rank


def start_group(environ: dict[str, str]) -> WorkerGroup:
    return WorkerGroup(
        fake_rank.SIZE,
        lambda rank, fd: [sys.executable, "-m", fake_rank.__name__, str(fd)],
        lambda rank, fd: Join(rank, "worker#1", 10, fd, 0),
        environ,
    )


if __name__ == "__main__":
    group = start_group(dict(os.environ))
    pids = b" ".join(group.wait_until_ready())
    group.log(Rest())
    sys.stdout.write(pids.decode() + "\n")
    sys.stdout.flush()
    threading.Event().wait()
