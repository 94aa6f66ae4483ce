"""The gateway stops while a stream runs, and starts without workers."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from kvtransfer.shm import DIRECTORY, PREFIX
from tests.e2e.clients import completion
from tests.e2e.stack import BATON, Stack
from tests.e2e.tiny import save_tiny


def test_a_stream_that_the_gateway_cannot_finish_ends_with_an_error_event(tmp_path: Path) -> None:
    stack = Stack("--kv-cache-memory=900MB", "--dtype=float32", log_dir=tmp_path)
    body = completion("Once upon a time", max_tokens=2000, stream=True)
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=30) as response:
        events = response.iter_lines()
        assert next(events).startswith("data: {")
        stack.signal("gateway", signal.SIGTERM)
        *_, error, done = [line for line in events if line]
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "service_unavailable"
    assert done == "data: [DONE]"
    assert stack.stop() == 0


def test_without_workers_the_answer_is_503_after_a_bounded_wait(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    command = [sys.executable, str(BATON), "gateway", "--port=0", f"--bind=ipc://{tmp_path}/inbox"]
    options = [f"--model={tmp_path / 'model'}", "--no-worker-timeout=0.3"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as gateway:
        assert gateway.stderr is not None
        line = next(line for line in gateway.stderr if "listening at" in line)
        url = line.partition("listening at ")[2].partition(",")[0]
        response = httpx.post(f"{url}/v1/completions", json=completion("x", max_tokens=1), timeout=10)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert "prefill" in response.json()["error"]["message"]
        assert httpx.get(f"{url}/ready").status_code == 503
        second = subprocess.run(
            [*command[:3], f"--port={url.rpartition(':')[2]}", f"--bind=ipc://{tmp_path}/other", *options],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert second.returncode == 2
        assert f"127.0.0.1:{url.rpartition(':')[2]}" in second.stderr
        gateway.terminate()
        assert gateway.wait(10) == 0


def test_a_prefill_worker_that_is_stopped_while_it_loads_leaves_no_shared_memory(tmp_path: Path) -> None:
    peers = [f"--gateway=ipc://{tmp_path}/gateway", f"--bind=ipc://{tmp_path}/inbox"]
    command = [sys.executable, str(BATON), "prefill", *peers, "--kv-cache-memory=50MB"]
    others = set(DIRECTORY.glob(f"{PREFIX}*"))
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as worker:
        try:
            while not (segments := set(DIRECTORY.glob(f"{PREFIX}*")) - others):
                assert worker.poll() is None
            (segment,) = segments
            while segment.stat().st_size == 0:  # from here on it is there to stay
                assert worker.poll() is None
            worker.terminate()
            assert worker.wait(30) == 0
        finally:
            worker.kill()
    assert not segment.exists()
