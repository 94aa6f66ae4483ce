"""Services started by hand, in an odd order and with options that do not match: each says what is wrong."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.e2e.clients import ask, completion
from tests.e2e.stack import START_S, Command
from tests.e2e.tiny import save_tiny


class Services:
    """Processes that meet in one folder and serve one tiny model."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        save_tiny(folder / "model")

    def start(self, *argv: str) -> Command:
        command = Command(*argv, f"--model={self._folder / 'model'}")
        self._stack.callback(command.close)
        return command

    def start_worker(self, role: str, name: str, *options: str) -> Command:
        places = [f"--bind=ipc://{self._folder}/{name}", f"--data-bind=ipc://{self._folder}/{name}.kv"]
        sizes = ["--dtype=float32", "--cores=1", "--kv-cache-memory=2MB"]
        return self.start(role, f"--gateway=ipc://{self._folder}/gateway", f"--name={name}", *places, *sizes, *options)

    def start_gateway(self) -> Command:
        return self.start("gateway", "--port=0", f"--bind=ipc://{self._folder}/gateway", "--no-worker-timeout=0.3")


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with ExitStack() as stack:
        yield Services(tmp_path, stack)


def test_misfits_are_named_and_a_match_makes_the_stack_ready(services: Services) -> None:
    misfit = services.start_worker("decode", "d0", "--block-size=8")
    misfit.wait_for(r"WARNING.* no gateway at (ipc://\S+) yet: No such file or directory", START_S)
    gateway = services.start_gateway()
    url = gateway.wait_for(r"listening at (http://[^,]+),", START_S)
    misfit.wait_for(r"INFO.* joined gateway (\S+)", START_S)
    services.start_worker("prefill", "p0")
    gateway.wait_for(r"WARNING.* worker (\S+) cannot serve model: .*block_size: 16 != 8 of d0", START_S)
    assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/ready").status_code == 503
    refusal = httpx.post(f"{url}/v1/completions", json=completion("x", max_tokens=2), timeout=10)
    assert refusal.status_code == 503
    assert "no live KV-compatible decode worker" in refusal.json()["error"]["message"]
    services.start_worker("decode", "d1")
    gateway.wait_for(r"(every pool has a live worker)", START_S)
    assert httpx.get(f"{url}/ready").status_code == 200
    assert ask(url, completion("x", max_tokens=3))["usage"]["completion_tokens"] == 3
    assert gateway.shown.count("cannot serve") == 1
