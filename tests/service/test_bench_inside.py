"""The commands of `baton bench` that look at the engine from inside, on a model that takes no time."""

import json
from pathlib import Path
from typing import Any

import pytest

import baton
from tests.model import tiny_models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save("grouped", folder)
    return folder


def results_of(command: str, model: Path, folder: Path, *flags: str) -> dict[str, Any]:
    """What the command writes, its plot included."""
    files = (f"--json={folder / 'results.json'}", f"--plot={folder / 'plot.svg'}")
    assert baton.main(["bench", command, f"--model={model}", *files, *flags]) == 0
    assert (folder / "plot.svg").stat().st_size > 0
    return json.loads((folder / "results.json").read_text())


def test_steps_are_timed_along_every_curve(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--batch-sizes=1,3", "--batch-context=20", "--contexts=2,40,1024", "--context-batch=2", "--prompt-lens=8")
    results = results_of("steps", model, tmp_path, *sizes, "--step-repeats=2", "--cores=1")
    found = {curve["name"]: [point["size"] for point in curve["points"]] for curve in results["curves"]}
    assert found == {"batch": [1, 3], "context": [2, 40], "prompt": [8]}
    assert {len(point["times_s"]) for curve in results["curves"] for point in curve["points"]} == {2}
    shown = capsys.readouterr().out
    assert "time grows as sequences to the power of: to 3" in shown
    assert "Left out, longer than the model takes: 1024" in shown


def test_a_cache_that_does_not_fit_is_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "steps", f"--model={model}", "--curves=batch", "--batch-sizes=1000000000", "--batch-context=512"]
    assert baton.main(argv) == 2
    assert "batch times context must fit into the" in capsys.readouterr().err


def test_handoffs_are_timed_over_both_transports(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = results_of("handoff", model, tmp_path, "--handoff-lens=16,40", "--handoff-repeats=3")
    found = [(h["transport"], h["num_tokens"], len(h["times_s"])) for h in results["handoffs"]]
    assert found == [("shm", 16, 3), ("shm", 40, 3), ("tcp", 16, 3), ("tcp", 40, 3)]
    block_bytes = results["handoffs"][0]["num_bytes"]
    assert results["handoffs"][1]["num_bytes"] == 3 * block_bytes  # 40 tokens take three blocks of 16
    assert results["connect_s"].keys() == {"shm", "tcp"}
    assert "Handoffs between two processes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["handoff", "--transports=pigeon"], "--transports: got 'pigeon', wanted shm, tcp or both"),
        (["handoff", "--plot=x.gif"], "--plot: got x.gif, wanted a name that ends in .png or .svg"),
        (["handoff", "--plot=/nowhere/x.png"], "wanted a file in a folder that exists"),
    ],
)
def test_unusable_flags_are_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert baton.main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err
