"""A rank of a worker group other than rank 0: it replays rank 0's log, and lives only as long as its group does.

1. `Join` says which rank it is; its shard is loaded, and `Ready` sent.
2. Each `Step` is computed together with the other ranks; what was sealed in it is answered with checksums.
3. `Transfer` entries go to this rank's side of the KV transfer, whose events go back.
4. `Stop` ends it. So do an error of its own, which it reports, and the end or the silence of rank 0.
"""

import logging
import signal
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from common.config import WorkerCommand
from common.engine.collectives import find_meeting, join
from common.engine.loading import Allocate, LoadedShard, ModelPlan, load_shard, plan_model
from common.engine.parallel import Shard
from common.engine.rank_channel import (
    Applied,
    CacheSize,
    Claim,
    Failed,
    Join,
    RankEnd,
    Ready,
    Rest,
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
from common.engine.runner import ModelRunner
from common.errors import BatonError, ConfigError, ModelError
from common.ids import PeerId
from common.machine import num_available_cores
from common.wire import Role
from kernels.cpu.group_memory import GroupMemory
from kernels.group import GroupBroken

logger = logging.getLogger(__name__)


class RankTransfer(Protocol):
    """This rank's side of the KV transfer."""

    @property
    def shard(self) -> bytes:
        """What rank 0 is told of it, encoded."""
        ...

    @property
    def is_alive(self) -> bool:
        """False when it was closed, or cannot go on. Any thread."""
        ...

    def apply(self, effect: bytes) -> None:
        """Never blocks."""
        ...

    def close(self) -> None: ...


class NoTransfer:
    """Of a worker that hands nothing over."""

    shard = b""
    is_alive = True

    def apply(self, effect: bytes) -> None:
        raise AssertionError(f"this worker has no KV transfer, got {effect!r}")

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class RankPart:
    """What a rank has loaded. peer: of its side of the KV transfer."""

    peer: PeerId
    plan: ModelPlan
    shard: Shard
    own: LoadedShard


def run_rank(
    role: Role,
    command: WorkerCommand,
    allocate: Allocate,
    make_transfer: Callable[[RankPart, Callable[[TransferEvent], None]], RankTransfer],
) -> int:
    """Replay rank 0's log until it ends; return the exit code.

    make_transfer: given our part, once it is loaded, and what reports to rank 0
    """
    channel = end_of_rank(socket.socket(fileno=command.rank.rank_fd))
    joined = channel.receive()
    if not isinstance(joined, Join):
        raise ConfigError(f"rank_fd must be the log of a rank, got {joined} from it")
    memory = GroupMemory(joined.memory_fd, command.worker.tensor_parallel_size)
    watch = RankWatch(channel, memory, joined.rank)
    try:
        part = _load(role, command, channel, joined, memory, allocate)
        with closing(make_transfer(part, channel.send)) as transfer:
            watch.is_healthy = lambda: transfer.is_alive
            channel.send(Ready(transfer.shard))
            part.own.runner.allow_binding()
            return _replay(channel, part.own, transfer, watch)
    except GroupBroken as error:
        logger.info("the group is broken: %s", error)
    except (BrokenPipeError, ConnectionResetError):
        logger.info("rank 0 is gone")
    except Exception as error:
        if watch.has_ended:
            logger.info("this rank is being ended: %s", error)
            return 1
        logger.log(logging.ERROR, "this rank has failed: %s", error, exc_info=not isinstance(error, BatonError))
        with suppress(OSError):  # rank 0 is gone, too
            channel.send(Failed(str(error), is_unusable=isinstance(error, ConfigError | ModelError)))
    finally:
        memory.abort()
    return 1


def _load(
    role: Role, command: WorkerCommand, channel: RankEnd, joined: Join, memory: GroupMemory, allocate: Allocate
) -> RankPart:
    """Raises: ConfigError, ModelError, GroupBroken."""
    worker, rank = command.worker, joined.rank
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: rank 0 drains, and tells us when to stop
    plan = plan_model(command.model, worker)
    plan.placements[rank].make_current()
    meeting, num_cores = find_meeting(joined.torch_port, memory.size), worker.cores or num_available_cores()
    group = join(meeting, memory, rank, num_cores, plan.placements[rank].device)
    agree = partial(agree_on_blocks, channel)
    own = load_shard(plan, rank, joined.num_blocks, role, command, allocate, group=group, agree=agree)
    return RankPart(PeerId(f"{joined.peer}/{rank}"), plan, plan.shards[rank], own)


def _replay(channel: RankEnd, own: LoadedShard, transfer: RankTransfer, watch: RankWatch) -> int:
    while (entry := channel.receive()) is not None:
        watch.has_begun = True
        match entry:
            case Step():
                _compute(channel, own.runner, entry)
            case Claim():
                own.runner.claim_cores()
            case Rest():
                own.runner.rest()
            case Transfer(effect, is_answered):
                transfer.apply(effect)
                if is_answered:
                    channel.send(Applied())
            case Stop():
                return 0
            case Join() | CacheSize():
                raise AssertionError("a rank is told once what it is")
    logger.info("rank 0 is gone")
    return 1


def _compute(channel: RankEnd, runner: ModelRunner, step: Step) -> None:
    plan = to_plan(step)
    checksums = runner.follow(plan)
    sealed = [block_id for sequence in plan.sequences for block_id in sequence.seal]
    if sealed:
        channel.send(Sealed([checksums[block_id] for block_id in sealed]))
