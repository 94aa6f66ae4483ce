"""A process of a worker group dies or freezes: all of the group goes, nothing of it is left, and streams go on."""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.clients import stream_all
from tests.e2e.stack import (
    START_S,
    Command,
    Stack,
    find_child,
    is_running,
    shared_segments,
    wait_until,
    wait_until_ended,
)
from tests.e2e.test_deaths import NUM_SEEN, NUM_TOKENS, bodies, check_against_undisturbed, prefill_total
from tests.e2e.tiny import save_tiny

PREFILL_TP = 2
DECODE_TP = 3
NUM_WORKERS = 4
GONE_S = 4.0
"""For a whole group to end: that a rank is frozen is noticed after 1.5 s, and this machine may be busy."""

RESTART_S = 90.0
"""For all processes of a worker to import what they need, and to load."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers in each pool. When they have stopped, no rank is left and no shared memory."""
    folder = tmp_path_factory.mktemp("rank_deaths")
    save_tiny(folder / "model")
    running = Stack(
        *(f"--model={folder / 'model'}", "--dtype=float32", "--kv-cache-memory=20MB"),
        *("--prefill=2", "--decode=2", f"--prefill-tp={PREFILL_TP}", f"--decode-tp={DECODE_TP}"),
        "--max-batch-prefill-tokens=32",
        log_dir=folder,
    )
    yield running
    prefill = [pid for worker in ("prefill-0", "prefill-1") for pid in running.pids(worker, PREFILL_TP)]
    decode = [pid for worker in ("decode-0", "decode-1") for pid in running.pids(worker, DECODE_TP)]
    segments = {path for pid in prefill for path in shared_segments(pid)}
    assert len(segments) == len(prefill)
    assert running.stop() == 0
    assert not any(map(is_running, prefill + decode))
    assert not any(path.exists() for path in segments)


@pytest.fixture
def stack(running: Stack) -> Iterator[Stack]:
    """At rest before, and after: all workers are there, and none owns a block."""
    running.wait_until_at_rest(NUM_WORKERS, RESTART_S)
    yield running
    running.wait_until_at_rest(NUM_WORKERS, RESTART_S)


def strike(ranks: Sequence[int], rank: int, number: signal.Signals) -> None:
    """Signal one process of a group, and see all of them go. ranks: their process ids."""
    os.kill(ranks[rank], number)
    wait_until_ended(ranks, GONE_S)


def check_that_streams_survive(stack: Stack, worker: str, rank: int, number: signal.Signals, first: int) -> None:
    """first: token of the prompts, so that no cache knows them."""
    requests = bodies(first, num_prompt=40, num_tokens=NUM_TOKENS)
    ranks, num_resumed = stack.pids(worker, DECODE_TP), prefill_total(stack, "later_tokens_sampled")
    streams = stream_all(stack.url, requests, when=[(NUM_SEEN, lambda: strike(ranks, rank, number))])
    stack.wait_until(lambda: prefill_total(stack, "later_tokens_sampled") > num_resumed)
    check_against_undisturbed(stack, requests, streams)
    stack.wait_until_restarted(worker, ranks[0])


# Workers take turns: one that dies again and again is started later each time.
@pytest.mark.parametrize(
    ("worker", "rank"),
    [
        ("decode-0", 0),
        pytest.param("decode-1", 1, marks=pytest.mark.full),
        pytest.param("decode-0", 2, marks=pytest.mark.full),
    ],
)
def test_streams_go_on_when_a_rank_of_a_decode_worker_is_killed(stack: Stack, worker: str, rank: int) -> None:
    check_that_streams_survive(stack, worker, rank, signal.SIGKILL, first=rank * 40)


def test_streams_go_on_when_a_rank_of_a_decode_worker_freezes_which_is_then_killed(stack: Stack) -> None:
    check_that_streams_survive(stack, "decode-1", 1, signal.SIGSTOP, first=120)


def test_prompts_queued_at_a_prefill_worker_whose_rank_is_killed_are_computed_elsewhere(stack: Stack) -> None:
    requests = bodies(first=160, num_prompt=400, num_tokens=20)
    ranks, num_retries = stack.pids("prefill-0", PREFILL_TP), stack.metric("baton_gateway_retries_total")
    streams = stream_all(stack.url, requests, when=[(1, lambda: strike(ranks, 1, signal.SIGKILL))])
    assert stack.metric("baton_gateway_retries_total") > num_retries
    check_against_undisturbed(stack, requests, streams)
    stack.wait_until_restarted("prefill-0", ranks[0])


def test_a_worker_that_is_stopped_while_its_ranks_start_leaves_none(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    places = [f"--gateway=ipc://{tmp_path}/gateway", f"--bind=ipc://{tmp_path}/d0"]
    worker = Command("decode", "--name=d0", f"--model={tmp_path / 'model'}", *places, "--tensor-parallel-size=2")
    try:
        wait_until(lambda: find_child(worker.pid, "d0/1") is not None, START_S)
        rank = find_child(worker.pid, "d0/1")
        worker.terminate()
        assert worker.wait(START_S) == 0
        assert rank is not None
        assert not is_running(rank)
    finally:
        worker.close()
