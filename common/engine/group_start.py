"""Starts the other ranks of a worker: with rank 0's own options, but for what each must have of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from common.config import (
    AggregatedCommand,
    DecodeCommand,
    PrefillCommand,
    RankOptions,
    SupervisionOptions,
    WorkerCommand,
)
from common.engine.collectives import join, open_meeting
from common.engine.devices import Placement
from common.engine.rank_channel import Join
from common.engine.worker_group import WorkerGroup
from common.flags import to_argv
from common.ids import PeerId
from common.machine import num_available_cores
from common.program import PROGRAM
from common.supervisor.plan import child_environ
from kernels.group import Group


def with_shared_dir(command: WorkerCommand, shared_dir: str) -> WorkerCommand:
    """Ranks share cores as workers do, so they need a place to meet."""
    return replace(command, worker=replace(command.worker, shared_dir=shared_dir))


@contextmanager
def start_ranks(
    command: WorkerCommand, peer: PeerId, num_blocks: int, placement: Placement
) -> Iterator[tuple[WorkerGroup, Group]]:
    """The other ranks, which end with the context, and our place in the collectives of all.

    placement: of rank 0

    Raises: ConfigError, GroupFailed.
    """
    worker = command.worker
    size = worker.tensor_parallel_size
    meeting = open_meeting(worker.collectives, size, placement.device)
    group = WorkerGroup(
        size,
        lambda rank, fd: rank_argv(command, rank, fd),
        lambda rank, fd: Join(rank, peer, num_blocks, fd, meeting.port),
        child_environ(dict(os.environ), {}),
    )
    try:
        yield group, join(meeting, group.memory, 0, worker.cores or num_available_cores(), placement.device)
    finally:
        group.close()


def rank_argv(command: WorkerCommand, rank: int, fd: int) -> list[str]:
    """fd: the rank's end of the log."""
    match command:
        case PrefillCommand():
            transfer = replace(command.transfer, data_bind=bind_of_rank(command.transfer.data_bind, rank))
            return _argv("prefill", replace(command, transfer=transfer), rank, fd)
        case DecodeCommand():
            return _argv("decode", command, rank, fd)
        case AggregatedCommand():
            return _argv("aggregated", command, rank, fd)


def _argv(name: str, command: WorkerCommand, rank: int, fd: int) -> list[str]:
    worker = replace(command.worker, name=f"{command.worker.name or name}/{rank}")
    changes = {"worker": worker, "rank": RankOptions(rank_fd=fd), "supervision": SupervisionOptions()}
    return [*PROGRAM, name, *to_argv(replace(command, **changes))]


def bind_of_rank(bind: str, rank: int) -> str:
    """Next to rank 0's: a path with the rank behind it, the port so many further; any free port stays that."""
    if bind.startswith("ipc://"):
        return bind if bind.endswith("*") else f"{bind}.{rank}"
    host, _, port = bind.rpartition(":")
    return bind if port == "*" else f"{host}:{int(port) + rank}"
