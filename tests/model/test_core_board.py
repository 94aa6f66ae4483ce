"""Workers of one host meet in a folder: places, homes, and what becomes of a worker that is gone."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.engine import core_board
from common.engine.core_board import CoreBoard, find_cores
from common.errors import ConfigError
from kernels.blocks import MLPWeights
from kernels.cpu.cores import Cores, private_cores, read_homes, write_homes, write_urgency
from kernels.cpu.ops import CpuOps
from tests.kernels.test_cpu_ops import Random

TAKE_A_PLACE = """
import sys
from pathlib import Path
from common.engine.core_board import CoreBoard
board = CoreBoard(Path(sys.argv[1]), int(sys.argv[2]), borrows=True, is_urgent=False)
print(board.cores.worker, flush=True)
sys.stdin.read()
"""


class OtherWorker:
    """A process that has a place until it is closed."""

    def __init__(self, folder: Path, num_cores: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", TAKE_A_PLACE, str(folder), str(num_cores)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.worker = int(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.parametrize(
    ("num_cores", "workers", "homes"),
    [
        (1, [0], [{0}]),
        (2, [0, 1], [{0}, {1}]),
        (4, [2, 5], [{2}, {5}, {2}, {5}]),
        (3, [0, 1], [{0}, {1}, {0}]),
        (2, [0, 1, 2], [{0, 2}, {1}]),
        (1, [0, 63], [{0, 63}]),
    ],
)
def test_cores_are_dealt_out_in_turn(num_cores: int, workers: list[int], homes: list[set[int]]) -> None:
    board = private_cores(num_cores).board
    write_homes(board, num_cores, workers)
    assert read_homes(board, num_cores) == homes


def test_a_worker_without_a_folder_has_its_cores_for_itself() -> None:
    cores, board = find_cores("", 3, borrows=True, is_urgent=False)
    assert board is None
    assert cores.num_home() == 3


def test_workers_that_come_and_go_share_the_cores(tmp_path: Path) -> None:
    ours = CoreBoard(tmp_path / "shared", 4, borrows=True, is_urgent=False)
    assert ours.cores.num_home() == 4
    other = OtherWorker(tmp_path / "shared", 4)
    assert (ours.cores.worker, other.worker) == (0, 1)
    assert ours.cores.num_home() == 2
    other.kill()
    ours.refresh()
    assert ours.cores.num_home() == 4
    next_one = OtherWorker(tmp_path / "shared", 4)
    assert next_one.worker == 1
    next_one.kill()


def test_workers_keep_their_homes_when_somebody_removes_the_folder(tmp_path: Path) -> None:
    ours = CoreBoard(tmp_path / "shared", 4, borrows=True, is_urgent=False)
    other = OtherWorker(tmp_path / "shared", 4)
    shutil.rmtree(tmp_path / "shared")
    ours.refresh()
    assert ours.cores.num_home() == 2
    other.kill()


def test_what_a_dead_worker_had_wanted_or_borrowed_is_forgotten() -> None:
    board = private_cores(2).board
    write_homes(board, 2, [0, 1])
    write_urgency(board, 2, 1, is_urgent=True)
    board[8] = 0b11  # core 0 is wanted by both
    board[24] = 2  # and borrowed by worker 1
    write_homes(board, 2, [0])
    assert (board[8], board[16], board[24]) == (0b01, 0, 0)


def test_a_board_of_workers_that_know_another_layout_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "cores-4"
    theirs.write_bytes(b"\xff" * 4 * 64)
    ours = CoreBoard(tmp_path, 4, borrows=True, is_urgent=False)
    assert ours.cores.num_home() == 4
    assert theirs.read_bytes() == b"\xff" * 4 * 64


def test_too_many_workers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_board, "MAX_WORKERS", 1)
    first = CoreBoard(tmp_path, 2, borrows=True, is_urgent=False)
    with pytest.raises(ConfigError, match="at most 1 workers"):
        CoreBoard(tmp_path, 2, borrows=True, is_urgent=False)
    assert first.cores.num_home() == 2


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"shared_dir .*file/x cannot be used"):
        CoreBoard(tmp_path / "file" / "x", 2, borrows=True, is_urgent=False)


class Worker:
    """Native ops over a board of two cores, with enough work in a call that a helper comes."""

    def __init__(self, cores: Cores) -> None:
        random = Random(torch.bfloat16)
        weights = MLPWeights(random.norm(576), random.linear(3072, 576), random.linear(576, 1536))
        self.board = cores.board
        self.ops = CpuOps(torch.bfloat16, 64, 16, cores)
        self._mlp = self.ops.mlp(weights)
        self._x, self._residual = torch.zeros(2, 512, 576)

    def step(self) -> int:
        """Returns how many tasks helpers ran."""
        before = self.ops.num_helped
        self.ops.begin_step()
        self._mlp(self._x, self._residual)
        return self.ops.num_helped - before

    def step_until_helped(self) -> None:
        while self.step() == 0:
            pass


def two_workers(*, borrows: bool) -> tuple[Worker, Worker]:
    board = private_cores(2).board
    write_homes(board, 2, [0, 1])
    return Worker(Cores(board, 2, 0, borrows)), Worker(Cores(board, 2, 1, borrows))


def test_a_core_is_lent_while_its_worker_rests_and_given_back_at_once() -> None:
    first, second = two_workers(borrows=True)
    first.step_until_helped()
    second.step()
    assert first.ops.others_want_cores()
    first.step()  # a helper that is in the middle of a task may end it
    assert [first.step() for _ in range(20)] == [0] * 20
    second.ops.rest()
    assert not first.ops.others_want_cores()
    first.step_until_helped()


def test_a_core_that_is_claimed_is_given_back_before_the_step_it_is_claimed_for() -> None:
    first, second = two_workers(borrows=True)
    first.step_until_helped()
    second.ops.claim_cores()
    assert first.ops.others_want_cores()
    first.step()  # a helper that is in the middle of a task may end it
    assert [first.step() for _ in range(20)] == [0] * 20


@pytest.mark.parametrize("is_urgent", [False, True])
def test_what_is_urgent_gives_way_to_prompts_only(is_urgent: bool) -> None:
    board = private_cores(2).board
    write_homes(board, 2, [0, 1])
    write_urgency(board, 2, 0, is_urgent=True)
    write_urgency(board, 2, 1, is_urgent=is_urgent)
    first, second = Worker(Cores(board, 2, 0)), Worker(Cores(board, 2, 1))
    second.step()
    assert first.ops.others_want_cores() is not is_urgent


def num_wakeups() -> int:
    """Of all threads of this process, ever."""
    lines = (line for task in Path("/proc/self/task").iterdir() for line in (task / "status").read_text().splitlines())
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))


def test_helpers_of_a_worker_that_rests_sleep_although_others_want_their_cores() -> None:
    first, second = two_workers(borrows=True)
    second.step()
    first.step()
    first.ops.rest()
    before = num_wakeups()
    threading.Event().wait(0.5)
    # Those that look twice a millisecond whether they may come back would wake up nearly a thousand times.
    assert num_wakeups() - before < 200


def test_static_cores_are_not_lent() -> None:
    first, second = two_workers(borrows=False)
    assert [first.step() for _ in range(20)] == [0] * 20
    assert [second.step() for _ in range(20)] == [0] * 20


def test_a_worker_alone_uses_all_cores_even_without_borrowing() -> None:
    cores = private_cores(2)
    Worker(Cores(cores.board, 2, 0, borrows=False)).step_until_helped()


@pytest.fixture
def two_cpus() -> Iterator[list[int]]:
    """Those that this thread, and the ones that it starts, may run on meanwhile."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one CPU")
    cpus = sorted(before)[:2]
    os.sched_setaffinity(0, cpus)
    yield cpus
    os.sched_setaffinity(0, before)


def threads_bound_to(cpu: int) -> int:
    masks = (os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir())
    return sum(mask == {cpu} for mask in masks)


def test_threads_stay_on_their_cores_while_each_worker_has_one(two_cpus: list[int]) -> None:
    first, second = two_workers(borrows=True)
    second.step()
    assert os.sched_getaffinity(0) == set(two_cpus)
    second.ops.allow_binding()
    second.step()
    assert os.sched_getaffinity(0) == {two_cpus[1]}
    second.step_until_helped()
    assert threads_bound_to(two_cpus[0]) == 1
    second.ops.rest()
    assert os.sched_getaffinity(0) == {two_cpus[1]}
    first.step()
    write_homes(second.board, 2, [1])  # the first one is gone
    second.step()
    assert os.sched_getaffinity(0) == set(two_cpus)
    while threads_bound_to(two_cpus[0]):  # helpers notice it when they next look for work
        second.step()


@pytest.mark.parametrize("workers", [[0], [0, 1, 2]], ids=["alone", "more workers than cores"])
def test_threads_go_where_they_can_where_cores_are_not_dealt_out_evenly(
    two_cpus: list[int], workers: list[int]
) -> None:
    worker, _ = two_workers(borrows=True)
    worker.ops.allow_binding()
    write_homes(worker.board, 2, workers)
    worker.step_until_helped()
    assert os.sched_getaffinity(0) == set(two_cpus)


def test_threads_are_not_bound_to_cores_that_are_only_a_number_of_them(two_cpus: list[int]) -> None:
    board = private_cores(3).board
    write_homes(board, 3, [0, 1])
    worker = Worker(Cores(board, 3, 1))
    worker.ops.allow_binding()
    worker.step()
    assert os.sched_getaffinity(0) == set(two_cpus)
