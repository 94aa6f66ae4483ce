"""Rank 0's hold on the other ranks of its worker group: their processes, the log that they replay, their answers.

1. The ranks are started with rank 0's own command line, load their shards at the same time, and say `Ready`.
2. Rank 0 logs every step and every transfer effect before it does its own part; then it collects what is answered.
3. A rank that fails, dies or is silent breaks the group: everyone who waits for it is told, rank 0's loop ends with
   `GroupFailed`, and `close` leaves no process behind.
"""

import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeVar

from common.engine.rank_channel import (
    CacheSize,
    Entry,
    Failed,
    Join,
    RankChannel,
    Ready,
    Reply,
    Room,
    Stop,
    TransferEvent,
    end_of_rank_0,
)
from common.engine.rank_watch import BEAT_S, LEAVE_S, SILENT_S
from common.errors import BatonError, ConfigError, GroupFailed
from common.supervisor.policy import describe_exit
from kernels.cpu.group_memory import GroupMemory

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Reply)


@dataclass(slots=True)
class _Rank:
    """One of the others. answers: what it replied; None: there will be no more."""

    number: int
    process: "subprocess.Popen[bytes]"
    channel: RankChannel[Entry, Reply]
    answers: "SimpleQueue[Reply | None]" = field(default_factory=SimpleQueue)
    reader: threading.Thread | None = None


class WorkerGroup:
    """All ranks but rank 0, which is this process. Close it in any case.

    memory:             shared with them
    on_transfer_event:  takes what a rank's side of the KV transfer reports; called in other threads
    """

    def __init__(
        self,
        size: int,
        argv: Callable[[int, int], Sequence[str]],
        join: Callable[[int, int], Join],
        environ: dict[str, str],
    ) -> None:
        """Start the ranks.

        argv: command line of a rank, given its number and the descriptor of its end of the log
        join: what a rank is told first, given its number and the shared memory's descriptor
        """
        self.memory = GroupMemory.create(size)
        self.on_transfer_event: Callable[[bytes], None] = _unexpected
        self._failure: BatonError | None = None
        self._has_failed = threading.Event()
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._watch = threading.Thread(target=self._beat_and_watch, name="rank watch", daemon=True)
        self._ranks: list[_Rank] = []
        try:
            for number in range(1, size):
                self._start(number, argv, environ, join(number, self.memory.fd))
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return self.memory.size

    @property
    def is_alive(self) -> bool:
        return self._failure is None

    def _start(
        self, number: int, argv: Callable[[int, int], Sequence[str]], environ: dict[str, str], join: Join
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), self.memory.fd]
            process = subprocess.Popen(argv(number, fds[0]), env=environ, pass_fds=fds, stdin=subprocess.DEVNULL)
        rank = _Rank(number, process, end_of_rank_0(ours, SILENT_S))
        self._ranks.append(rank)
        rank.channel.send(join)
        rank.reader = threading.Thread(target=self._read, args=(rank,), name=f"rank {number}", daemon=True)
        rank.reader.start()

    def wait_until_ready(self) -> list[bytes]:
        """Block until all have loaded their shards; returns what their sides of the KV transfer say of themselves.

        Raises: ConfigError when one cannot start with what it was given; GroupFailed.
        """
        ready = self.collect(Ready)
        self.memory.beat(0)
        self._watch.start()
        return [one.shard for one in ready]

    def agree_on_blocks(self, num_blocks: int) -> int:
        """The fewest blocks that any rank has room for, which all are told. Raises: ConfigError, GroupFailed."""
        agreed = min(num_blocks, *(room.num_blocks for room in self.collect(Room)))
        self.log(CacheSize(agreed))
        return agreed

    def log(self, entry: Entry) -> None:
        """Have all do it, in the order of these calls. Raises: GroupFailed."""
        for rank in self._ranks:
            try:
                rank.channel.send(entry)
            except OSError as error:
                self._lose(rank)
                raise self.failure() from error

    def tell(self, entry: Entry) -> None:
        """As `log`, for any thread; nothing happens when the group is broken, which the main thread will see."""
        with suppress(GroupFailed, ConfigError):
            self.log(entry)

    def collect(self, kind: type[Answer]) -> list[Answer]:
        """The answer of every rank to the last entry that wanted one. Raises: GroupFailed."""
        answers: list[Answer] = []
        for rank in self._ranks:
            answer = rank.answers.get()
            if answer is None:
                raise self.failure()
            assert isinstance(answer, kind), f"rank {rank.number} was to answer with {kind.__name__}, got {answer}"
            answers.append(answer)
        return answers

    def failure(self) -> BatonError:
        """Why the group is broken, for whoever has seen that it is: a rank tells a moment later what its fault was."""
        self._has_failed.wait(LEAVE_S)
        return self._failure or GroupFailed("this worker's group was aborted")

    def break_up(self, reason: str) -> None:
        """From now on every wait for a rank fails. Any thread."""
        self._fail(GroupFailed(reason))

    def _fail(self, failure: BatonError) -> None:
        with self._lock:
            if self._failure is None and not self._is_closing.is_set():
                self._failure = failure
                self._has_failed.set()
                logger.error("%s", failure)
        self.memory.abort()
        for rank in self._ranks:
            rank.answers.put(None)

    def _read(self, rank: _Rank) -> None:
        while (reply := rank.channel.receive()) is not None:
            match reply:
                case TransferEvent(event):
                    self.on_transfer_event(event)
                case Failed(reason, is_unusable):
                    text = f"rank {rank.number} of {self.size}: {reason}"
                    self._fail(ConfigError(text) if is_unusable else GroupFailed(text))
                case _:
                    rank.answers.put(reply)
        if not self._is_closing.is_set():
            self._lose(rank)

    def _lose(self, rank: _Rank) -> None:
        with suppress(subprocess.TimeoutExpired):  # its sockets close a moment before it can be waited for
            rank.process.wait(LEAVE_S / 2)
        code = rank.process.returncode
        ended = "cannot be reached" if code is None else describe_exit(code)
        self.break_up(f"rank {rank.number} of {self.size} {ended}")

    def _beat_and_watch(self) -> None:
        while not self._is_closing.wait(BEAT_S):
            self.memory.beat(0)
            if silent := [rank for rank in self.memory.silent_ranks(SILENT_S) if rank]:
                self.break_up(f"rank {silent[0]} of {self.size} was silent for {SILENT_S} s")
                self._ranks[silent[0] - 1].process.kill()  # others may wait for its sockets
                return

    def close(self) -> None:
        """End all ranks: those that can leave by themselves in LEAVE_S, which they are told, and the others then."""
        self._is_closing.set()
        for rank in self._ranks:
            with suppress(OSError):
                rank.channel.send(Stop())
            rank.channel.close_writing()
        leave_by = time.monotonic() + LEAVE_S
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, leave_by - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("rank %d of %d does not end and is killed", rank.number, self.size)
                rank.process.kill()
                rank.process.wait()
            rank.channel.hang_up()
            if rank.reader:
                rank.reader.join()
            rank.channel.close()
        if self._watch.ident:
            self._watch.join()


def _unexpected(event: bytes) -> None:
    raise AssertionError(f"a rank reports {event!r}, and nobody has asked it")
