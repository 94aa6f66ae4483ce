"""The supervisor over real processes that stand in for the services."""

import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import wait_until

FAKE_SERVE = Path(__file__).with_name("fake_serve.py")
DEADLINE_S = 20.0


class Serve:
    """A running supervisor and what it shows. Lines are read by a thread, so that waiting has a deadline."""

    def __init__(self, log_dir: Path, *children: str) -> None:
        self.log_dir = log_dir
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, str(FAKE_SERVE), str(log_dir), *children], stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            try:
                self.shown += self._lines.get(timeout=deadline - time.monotonic())
            except (queue.Empty, ValueError):
                pytest.fail(f"waited for {text!r}, got {self.shown!r}")

    def pids(self) -> list[int]:
        """Of every child ever started."""
        logs = "".join(path.read_text() for path in self.log_dir.glob("*.log"))
        return [int(pid) for pid in re.findall(r"^pid (\d+)$", logs, re.MULTILINE)]

    def stop(self) -> float:
        """Seconds from SIGTERM to the supervisor's end."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(DEADLINE_S)
        return time.monotonic() - started

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[list[Serve]]:
    supervisors: list[Serve] = []
    yield supervisors
    for supervisor in supervisors:
        supervisor.close()


def start(running: list[Serve], tmp_path: Path, *children: str) -> Serve:
    running.append(Serve(tmp_path, *children))
    return running[-1]


def wait_until_gone(pid: int, timeout_s: float) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


def test_when_all_are_ready_the_url_and_a_request_are_shown(running: list[Serve], tmp_path: Path) -> None:
    serve = start(running, tmp_path, "gateway=gateway", "prefill-0=worker", "decode-0=worker")
    serve.wait_for("Logs are in")
    assert "Baton is ready at http://127.0.0.1:4711" in serve.shown
    assert "curl -N http://127.0.0.1:4711/v1/chat/completions" in serve.shown
    assert "decode-0: ready" in serve.shown


def test_sigterm_ends_all_children_with_exit_code_0(running: list[Serve], tmp_path: Path) -> None:
    serve = start(running, tmp_path, "gateway=gateway", "prefill-0=worker")
    serve.wait_for("Logs are in")
    pids = serve.pids()
    assert len(pids) == 2
    assert serve.stop() < 5.0
    assert serve.process.returncode == 0
    assert all(wait_until_gone(pid, 0) for pid in pids)


def test_a_child_that_ignores_sigterm_is_killed_within_five_seconds(running: list[Serve], tmp_path: Path) -> None:
    serve = start(running, tmp_path, "gateway=gateway", "prefill-0=stubborn")
    serve.wait_for("Logs are in")
    assert 3.5 < serve.stop() < 5.0
    assert serve.process.returncode == 0
    assert all(wait_until_gone(pid, 0) for pid in serve.pids())


def test_a_second_interrupt_ends_stubborn_children_at_once(running: list[Serve], tmp_path: Path) -> None:
    serve = start(running, tmp_path, "gateway=gateway", "prefill-0=stubborn")
    serve.wait_for("Logs are in")
    serve.process.send_signal(signal.SIGINT)
    serve.wait_for("Stopping.")
    assert serve.stop() < 2.0


def test_children_of_a_killed_supervisor_end_even_if_they_ignore_sigterm(running: list[Serve], tmp_path: Path) -> None:
    serve = start(running, tmp_path, "gateway=gateway", "prefill-0=worker", "decode-0=stubborn")
    serve.wait_for("Logs are in")
    pids = serve.pids()
    assert len(pids) == 3
    serve.process.kill()
    assert all(wait_until_gone(pid, 5.0) for pid in pids)


def test_a_child_that_dies_is_reported_with_its_last_lines_and_started_again(
    running: list[Serve], tmp_path: Path
) -> None:
    serve = start(running, tmp_path, "gateway=gateway", "prefill-0=dies-once")
    serve.wait_for("Logs are in")
    assert "prefill-0 killed by SIGKILL; starting it again in 0.5 s" in serve.shown
    assert "prefill-0 | line 25\n" in serve.shown
    assert "prefill-0 | line 39\n" in serve.shown
    assert "line 24\n" not in serve.shown
    assert len(serve.pids()) == 3


def test_a_child_that_dies_with_2_after_it_was_ready_is_started_again(running: list[Serve], tmp_path: Path) -> None:
    serve = start(running, tmp_path, "gateway=gateway", "prefill-0=dies-after-ready-once")
    serve.wait_for("prefill-0 ended with exit code 2; starting it again in 0.5 s")
    serve.wait_for("Logs are in")


def test_a_gateway_that_is_started_again_keeps_its_port(running: list[Serve], tmp_path: Path) -> None:
    serve = start(running, tmp_path, "gateway=gateway-that-dies-once", "prefill-0=worker")
    serve.wait_for("gateway ended with exit code 1")
    serve.wait_for("Logs are in")
    assert (tmp_path / "gateway.marker").read_text().splitlines() == ["[]", "['--port=4711']"]


def test_unusable_options_stop_everything_with_exit_code_2_and_the_message(
    running: list[Serve], tmp_path: Path
) -> None:
    serve = start(running, tmp_path, "gateway=gateway", "prefill-0=worker", "decode-0=unusable")
    assert serve.process.wait(DEADLINE_S) == 2
    serve.wait_for("decode-0 | baton decode: error: --model: got 'x', wanted a model")
    assert all(wait_until_gone(pid, 0) for pid in serve.pids())


def test_a_child_that_reports_junk_is_ended_and_started_again(running: list[Serve], tmp_path: Path) -> None:
    serve = start(running, tmp_path, "gateway=gateway", "prefill-0=junk")
    serve.wait_for("prefill-0: supervisor channel: got b'no event'")
    serve.wait_for("Logs are in")


def test_a_child_that_the_system_cannot_start_is_tried_again(running: list[Serve], tmp_path: Path) -> None:
    serve = start(running, tmp_path, "gateway=gateway", "prefill-0=worker-without-python")
    serve.wait_for("prefill-0 cannot be started: [Errno 2] No such file or directory")
    serve.wait_for("starting it again in 1 s.")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    serve.wait_for("Logs are in")


def test_logs_on_a_full_disk_stop_nothing(running: list[Serve], tmp_path: Path) -> None:
    """Where a file takes no byte, and where it cannot even be opened."""
    (tmp_path / "gateway.log").symlink_to("/dev/full")
    (tmp_path / "prefill-0.log").mkdir()
    serve = start(running, tmp_path, "gateway=gateway", "prefill-0=dies-once")
    serve.wait_for("prefill-0 killed by SIGKILL; starting it again in 0.5 s")
    serve.wait_for("Logs are in")
    serve.stop()
    assert serve.process.returncode == 0


def test_an_output_that_takes_nothing_stops_nothing(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        argv = [sys.executable, str(FAKE_SERVE), str(tmp_path), "gateway=gateway", "prefill-0=dies-once"]
        process = subprocess.Popen(argv, stdout=full)
    log = tmp_path / "prefill-0.log"
    try:
        wait_until(lambda: log.exists() and log.read_text().count("pid ") == 2, DEADLINE_S)
    finally:
        process.terminate()
    assert process.wait(DEADLINE_S) == 0
