"""What a newcomer does first: start it, paste the line that it shows."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.stack import START_S, STOP_S, Command

KEYS = "sk-a,sk-b"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_request_that_is_shown_streams_the_capital_of_france(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_API_KEY", KEYS)
    serve = Command("serve", "--port=0", f"--log-dir={tmp_path}")
    try:
        command = serve.wait_for(r"(?s)(  curl -N .*?)\n\n", START_S)
        pasted = subprocess.run(["/bin/sh"], input=command, capture_output=True, text=True, timeout=60)
        *events, done = [line for line in pasted.stdout.splitlines() if line]
        serve.terminate()
        assert serve.wait(STOP_S) == 0
    finally:
        serve.close()
    assert done == "data: [DONE]"
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert len(deltas) > 3
    assert "Paris" in "".join(delta.get("content", "") for delta in deltas)
