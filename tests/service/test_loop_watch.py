"""A worker whose loop hangs ends by itself, whatever it hangs in, and one that was only stopped or slow goes on."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.service import hanging_worker
from tests.service.hanging_worker import LIMIT_S, STARTED

DEADLINE_S = 30.0
ENVIRON = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def start(how: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", hanging_worker.__name__, how]
    return subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def hanging() -> "Iterator[dict[str, subprocess.Popen[str]]]":
    """Workers that hang, each in its own way. They take seconds to end, so they do it together."""
    with ExitStack() as stack:
        workers = {how: stack.enter_context(start(how)) for how in ("step", "effect", "log")}
        yield workers
        for worker in workers.values():
            worker.kill()


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("step", "the step of a/0 with 9 tokens has run for"),
        ("effect", "what the loop does between two steps has run for"),
    ],
)
def test_a_loop_that_hangs_ends_its_process_and_says_in_one_line_what_it_hung_in(
    how: str, what: str, hanging: "dict[str, subprocess.Popen[str]]"
) -> None:
    _, told = hanging[how].communicate(timeout=DEADLINE_S)
    assert hanging[how].returncode == 1
    (line,) = told.splitlines()
    assert what in line
    assert "in hang (" in line


def test_a_loop_that_hangs_in_its_log_ends_its_process_too(hanging: "dict[str, subprocess.Popen[str]]") -> None:
    """So the line that would say so cannot be waited for. Nobody reads what the worker writes."""
    assert hanging["log"].wait(DEADLINE_S) == 1


def test_a_step_that_is_slow_is_waited_for() -> None:
    with start("slow") as worker:
        _, told = worker.communicate(timeout=DEADLINE_S)
    assert (worker.returncode, "hangs" in told) == (0, False)


def test_a_process_that_was_stopped_in_a_step_has_not_hung() -> None:
    with start("slow") as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline().strip() == STARTED
        worker.send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(3 * LIMIT_S)
        worker.send_signal(signal.SIGCONT)
        _, told = worker.communicate(timeout=DEADLINE_S)
    assert (worker.returncode, "hangs" in told) == (0, False)
