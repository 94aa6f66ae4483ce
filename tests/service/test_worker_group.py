"""Rank 0 and ranks without a model: whatever happens to one of them, none is left, and rank 0 knows why."""

import os
import queue
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.engine.rank_channel import Applied, Rest, Sealed, Step, StepPart, Transfer
from common.engine.worker_group import WorkerGroup
from common.errors import ConfigError, GroupFailed
from common.ids import BlockId
from tests.service import fake_rank, fake_rank_0

DEADLINE_S = 30.0
Start = Callable[..., WorkerGroup]


def environ(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **more}


@pytest.fixture
def start() -> Iterator[Start]:
    groups: list[WorkerGroup] = []

    def start(**more: str) -> WorkerGroup:
        groups.append(fake_rank_0.start_group(environ(**more)))
        return groups[-1]

    yield start
    for group in groups:
        group.close()


def pids(ready: list[bytes]) -> list[int]:
    return [int(pid) for pid in ready]


def has_ended(pid: int) -> bool:
    """It may still be there for its parent to take note of."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def do(group: WorkerGroup, what: str) -> None:
    group.log(Transfer(what.encode(), is_answered=True))


def test_what_is_logged_is_done_in_order_and_answered_by_all(start: Start) -> None:
    group = start()
    group.wait_until_ready()
    seven, nine = BlockId(7), BlockId(9)
    group.log(Step([StepPart([1], 0, [seven], True, [seven]), StepPart([1], 0, [nine], False, [])]))
    assert group.collect(Sealed) == [Sealed([(1, 7)]), Sealed([(2, 7)])]
    group.log(Rest())
    do(group, "nothing")
    assert group.collect(Applied) == [Applied()] * 2


@pytest.mark.parametrize(("own", "agreed"), [(50, 11), (7, 7)])
def test_all_ranks_have_as_many_blocks_as_fit_everywhere(start: Start, own: int, agreed: int) -> None:
    group = start(ROOM="10")  # 11 and 12 at the others
    assert group.agree_on_blocks(own) == agreed
    assert group.wait_until_ready() == [str(agreed).encode()] * 2


def test_ranks_that_wait_to_agree_end_when_rank_0_gives_up(start: Start) -> None:
    group = start(ROOM="10")
    group.close()
    assert [rank.process.returncode for rank in group._ranks] == [1, 1], "they were not killed"


def test_events_of_ranks_are_handed_on(start: Start) -> None:
    group = start()
    group.wait_until_ready()
    events: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    group.on_transfer_event = events.put
    group.tell(Transfer(b"pulled", is_answered=False))
    assert [events.get(timeout=DEADLINE_S) for _ in range(2)] == [b"pulled"] * 2


def test_closing_ends_all_ranks(start: Start) -> None:
    group = start()
    ready = pids(group.wait_until_ready())
    group.close()
    assert group.is_alive
    assert all(map(has_ended, ready))


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("die 1", "rank 1 of 3 killed by SIGKILL"),
        ("die 2", "rank 2 of 3 killed by SIGKILL"),
        ("freeze 1", r"rank 1 of 3 was silent for 1\.5 s"),
    ],
)
def test_a_rank_that_dies_or_freezes_breaks_the_group(start: Start, what: str, reason: str) -> None:
    group = start()
    ready = pids(group.wait_until_ready())
    do(group, what)
    with pytest.raises(GroupFailed, match=reason):
        group.collect(Applied)
    assert not group.is_alive
    assert group.memory.is_aborted
    group.close()
    assert all(map(has_ended, ready))


def test_a_rank_that_does_nothing_any_more_is_killed_in_the_end(start: Start) -> None:
    group = start()
    ready = pids(group.wait_until_ready())
    do(group, "hang 1")
    group.close()
    assert all(map(has_ended, ready))


def test_a_rank_whose_log_is_full_ends_the_group_and_closing_waits_for_nobody(start: Start) -> None:
    group = start()
    ready = pids(group.wait_until_ready())
    do(group, "hang 1")
    with pytest.raises(GroupFailed, match="rank 1 of 3 cannot be reached"):
        group.log(Transfer(bytes(2**24), is_answered=False))
    group.close()
    assert all(map(has_ended, ready))


def test_a_broken_group_takes_nothing_more(start: Start) -> None:
    group = start()
    group.wait_until_ready()
    do(group, "die 1")
    with pytest.raises(GroupFailed):
        group.collect(Applied)
    with pytest.raises(GroupFailed, match="rank 1 of 3 killed by SIGKILL"):
        group.log(Rest())
    group.tell(Rest())


def test_what_rank_0_found_first_is_the_reason(start: Start) -> None:
    group = start()
    group.wait_until_ready()
    group.break_up("rank 0 of 3: the step failed")
    do(group, "die 1")
    with pytest.raises(GroupFailed, match="the step failed"):
        group.collect(Applied)


def test_a_rank_that_cannot_use_what_it_was_given_is_the_operator_s_error(start: Start) -> None:
    with pytest.raises(ConfigError, match="rank 2 of 3: there is no such file"):
        start(FAILS_TO_LOAD="there is no such file").wait_until_ready()


def test_a_rank_that_hangs_and_says_that_it_lives_ends_the_group_with_rank_0_s_patience() -> None:
    command = [sys.executable, "-m", fake_rank_0.__name__, "hang"]
    with subprocess.Popen(command, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as rank_0:
        told, reason = rank_0.communicate(timeout=DEADLINE_S)
    assert rank_0.returncode == 1
    assert "has run for" in reason
    assert all(has_ended(int(pid)) for pid in told.split())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_end_when_rank_0_is_gone_or_frozen(number: signal.Signals) -> None:
    command = [sys.executable, "-m", fake_rank_0.__name__]
    with subprocess.Popen(command, env=environ(), stdout=subprocess.PIPE, text=True) as rank_0:
        try:
            assert rank_0.stdout is not None
            ranks = [os.pidfd_open(int(pid)) for pid in rank_0.stdout.readline().split()]
            assert len(ranks) == fake_rank.SIZE - 1
            rank_0.send_signal(number)
            for rank in ranks:
                assert select.select([rank], [], [], DEADLINE_S)[0], "it has not ended"
                os.close(rank)
        finally:
            rank_0.kill()
