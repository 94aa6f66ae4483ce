"""Services started by hand, in an odd order and with options that do not match: each says what is wrong."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.e2e.clients import ask, completion
from tests.e2e.services import Services, url_of, wait_until_ready
from tests.e2e.stack import START_S


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with ExitStack() as stack:
        yield Services(tmp_path, stack)


def test_misfits_are_named_and_a_match_makes_the_stack_ready(services: Services, tmp_path: Path) -> None:
    misfit = services.start_worker("decode", "d0", "--block-size=8")
    misfit.wait_for(r"WARNING.* no gateway at (ipc://\S+) yet: No such file or directory", START_S)
    gateway = services.start_gateway("--no-worker-timeout=0.3")
    url = url_of(gateway)
    misfit.wait_for(r"INFO.* joined gateway (\S+)", START_S)
    services.start_worker("prefill", "p0")
    gateway.wait_for(r"WARNING.* worker (\S+) cannot serve model: .*block_size: 16 != 8 of d0", START_S)
    assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/ready").status_code == 503
    refusal = httpx.post(f"{url}/v1/completions", json=completion("x", max_tokens=2), timeout=10)
    assert refusal.status_code == 503
    assert "no live KV-compatible decode worker" in refusal.json()["error"]["message"]
    alive = tmp_path / "alive"
    services.start_worker("decode", "d1", f"--alive-file={alive}")
    wait_until_ready(gateway)
    assert alive.exists(), "a worker whose loop runs looks healthy"
    assert httpx.get(f"{url}/ready").status_code == 200
    assert ask(url, completion("x", max_tokens=3))["usage"]["completion_tokens"] == 3
    assert gateway.shown.count("cannot serve") == 1
