"""What rank 0 starts the other ranks with: its own options, and places of their own."""

import sys

import pytest

from common.config import (
    AggregatedCommand,
    DecodeCommand,
    PrefillCommand,
    TransferOptions,
    WorkerCommand,
    WorkerOptions,
    parse_command,
)
from common.engine.group_start import bind_of_rank, rank_argv

WORKER = WorkerOptions(name="w", block_size=32, tensor_parallel_size=3, shared_dir="/run/shared")


@pytest.mark.parametrize(
    "command", [PrefillCommand(worker=WORKER), DecodeCommand(worker=WORKER), AggregatedCommand(worker=WORKER)]
)
def test_a_rank_has_rank_0_s_options(command: PrefillCommand | DecodeCommand | AggregatedCommand) -> None:
    python, baton, name, *flags = rank_argv(command, 2, 7)
    assert (python, baton.endswith("/baton.py")) == (sys.executable, True)
    parsed = parse_command(name, flags, {})
    assert isinstance(parsed, WorkerCommand)
    assert type(parsed) is type(command)
    assert (parsed.worker.name, parsed.rank.rank_fd, parsed.supervision.supervisor_fd) == ("w/2", 7, -1)
    assert (parsed.worker.block_size, parsed.worker.tensor_parallel_size, parsed.worker.shared_dir) == (
        32,
        3,
        "/run/shared",
    )


def test_a_rank_of_a_worker_without_a_name_is_called_by_its_role() -> None:
    assert "--name=decode/1" in rank_argv(DecodeCommand(), 1, 7)


def test_a_rank_s_transfer_is_next_to_rank_0_s() -> None:
    command = PrefillCommand(worker=WORKER, transfer=TransferOptions(data_bind="ipc:///run/w.kv"))
    assert "--data-bind=ipc:///run/w.kv.2" in rank_argv(command, 2, 7)


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("tcp://0.0.0.0:7000", "tcp://0.0.0.0:7002"),
        ("tcp://[::1]:7000", "tcp://[::1]:7002"),
        ("ipc:///run/w.kv", "ipc:///run/w.kv.2"),
        ("ipc://*", "ipc://*"),
    ],
)
def test_every_rank_binds_to_a_place_of_its_own(bind: str, expected: str) -> None:
    assert bind_of_rank(bind, 2) == expected
