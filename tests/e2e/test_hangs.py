"""A worker that hangs in a step while it says that it lives: nobody takes it for healthy, and it ends itself."""

from pathlib import Path

import httpx
import pytest

from tests.e2e.clients import ask, completion, stream_all, token_ids
from tests.e2e.frozen_thread import freeze_in_native_op
from tests.e2e.stack import START_S, Stack, is_running
from tests.e2e.tiny import save_tiny

NUM_TOKENS = 400
NUM_SEEN = 10
STEP_TIMEOUT_S = 10.0
"""Longer than a worker is overdue before it ends, so that both can be seen."""


@pytest.mark.parametrize("hanging", ["decode-0", "decode-0/1"], ids=["a worker", "one of its ranks"])
def test_a_worker_that_hangs_in_a_step_is_not_ready_and_ends_and_its_streams_go_on(
    hanging: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "model")
    stack = Stack(
        *(f"--model={tmp_path / 'model'}", "--dtype=float32", "--kv-cache-memory=20MB"),
        *(f"--step-timeout={STEP_TIMEOUT_S}", f"--decode-tp={1 + hanging.count('/')}"),
        log_dir=tmp_path,
    )
    try:
        body = completion([1, 2, 3], max_tokens=NUM_TOKENS)
        pid, frozen = stack.pid("decode-0"), stack.pid(hanging)

        def hang() -> None:
            freeze_in_native_op(frozen)
            stack.wait_until(lambda: httpx.get(f"{stack.url}/ready").status_code == 503)
            assert is_running(pid)
            assert stack.counters("decode-0")["step_running_seconds"] < STEP_TIMEOUT_S, "it still says that it lives"

        (stream,) = stream_all(stack.url, [body], when=[(NUM_SEEN, hang)])
        stack.wait_until_restarted("decode-0", pid)
        stack.wait_until(lambda: httpx.get(f"{stack.url}/ready").status_code == 200, START_S)
        assert stream.token_ids == token_ids(ask(stack.url, body))
        stack.wait_until_at_rest()
    finally:
        assert stack.stop() == 0
    assert "has run for" in (tmp_path / "decode-0.log").read_text()
