"""A rank without a model: `python -m tests.service.fake_rank FD`. It does what it is told as a transfer effect."""

import os
import signal
import socket
import sys
import threading

from common.engine.rank_channel import (
    Applied,
    Failed,
    Join,
    Ready,
    Sealed,
    Step,
    Stop,
    Transfer,
    TransferEvent,
    agree_on_blocks,
    end_of_rank,
    to_plan,
)
from common.engine.rank_watch import RankWatch
from kernels.cpu.group_memory import GroupMemory

SIZE = 3


def main() -> int:
    channel = end_of_rank(socket.socket(fileno=int(sys.argv[1])))
    joined = channel.receive()
    assert isinstance(joined, Join)
    memory = GroupMemory(joined.memory_fd, SIZE)
    watch = RankWatch(channel, memory, joined.rank)
    if (reason := os.environ.get("FAILS_TO_LOAD")) and joined.rank == 2:
        channel.send(Failed(reason, is_unusable=True))
        return 2
    if room := os.environ.get("ROOM"):
        agreed = agree_on_blocks(channel, int(room) + joined.rank)
        channel.send(Ready(f"{agreed}".encode()))
    else:
        channel.send(Ready(str(os.getpid()).encode()))
    while (entry := channel.receive()) is not None:
        watch.has_begun = True
        match entry:
            case Step():
                sealed = [block_id for sequence in to_plan(entry).sequences for block_id in sequence.seal]
                channel.send(Sealed([(joined.rank, block_id) for block_id in sealed]))
            case Transfer(effect, is_answered):
                _obey(effect.decode(), joined.rank)
                channel.send(Applied() if is_answered else TransferEvent(effect))
            case Stop():
                return 0
            case _:
                pass
    return 1


def _obey(effect: str, rank: int) -> None:
    what, _, who = effect.partition(" ")
    if who == str(rank):
        match what:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                threading.Event().wait()
            case _:
                pass


if __name__ == "__main__":
    sys.exit(main())
