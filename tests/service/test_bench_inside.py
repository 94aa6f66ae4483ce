"""The commands of `baton bench` that look at the engine from inside, on a model that takes no time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import baton
from common.model_files import find_model
from gateway.tokenizer import load_tokenizer
from tests.e2e.tiny import save_tiny
from tests.model import tiny_models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a token a byte."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder)
    return folder


def results_of(command: str, model: Path, folder: Path, *flags: str) -> dict[str, Any]:
    """What the command writes."""
    path = folder / "results.json"
    assert baton.main(["bench", command, f"--model={model}", f"--json={path}", *flags]) == 0
    return json.loads(path.read_text())


def plotted_results_of(command: str, model: Path, folder: Path, *flags: str) -> dict[str, Any]:
    """The same of a command that also draws."""
    path = folder / "plot.svg"
    results = results_of(command, model, folder, f"--plot={path}", *flags)
    assert path.stat().st_size > 0
    return results


def test_steps_are_timed_along_every_curve(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--batch-sizes=1,3", "--batch-context=20", "--contexts=2,40,1024", "--context-batch=2", "--prompt-lens=8")
    results = plotted_results_of("steps", model, tmp_path, *sizes, "--step-repeats=2", "--cores=1")
    found = {curve["name"]: [point["size"] for point in curve["points"]] for curve in results["curves"]}
    assert found == {"batch": [1, 3], "context": [2, 40], "prompt": [8]}
    assert {len(point["times_s"]) for curve in results["curves"] for point in curve["points"]} == {2}
    shown = capsys.readouterr().out
    assert "time grows as sequences to the power of: to 3" in shown
    assert "Left out, longer than the model takes: 1024" in shown


FEW_PHASES = ("--phase-batch=2", "--phase-context=20", "--phase-prompt-len=40", "--phase-repeats=3")


def limit_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine could do is found in no time, and wrong."""
    monkeypatch.setattr("bench.inside.machine._READ_BYTES", 2**20)
    monkeypatch.setattr("bench.inside.machine._MATRIX_SIZE", 64)


def test_phases_of_a_step_are_told_apart(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_little(monkeypatch)
    results = plotted_results_of("phases", model, tmp_path, *FEW_PHASES)
    decode, prompt = ({phase["name"]: phase for phase in each["phases"]} for each in results["breakdowns"])
    assert {"schedule", "build batch", "qkv", "attention", "head", "sampling", "detokenize"} <= decode.keys()
    assert {"qkv", "attention", "checksums"} <= prompt.keys()
    assert {len(phase["times_s"]) for phase in decode.values()} == {3}
    assert all(time_s > 0 for name in ("qkv", "attention", "down") for time_s in decode[name]["times_s"])
    assert "Decode step, 2 sequences, context 20" in capsys.readouterr().out


def test_phases_of_a_step_that_ranks_share_show_what_passes_between_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_little(monkeypatch)
    results = results_of("phases", model, tmp_path, *FEW_PHASES, "--tensor-parallel-size=2", "--dtype=bfloat16")
    assert results["num_ranks"] == 2
    for breakdown in results["breakdowns"]:
        phases = {phase["name"]: phase["times_s"] for phase in breakdown["phases"]}
        assert all(time_s > 0 for name in ("announce", "all_reduce", "gather logits") for time_s in phases[name])
    assert "2 ranks on" in capsys.readouterr().out


def text_of(folder: Path, num_bytes: int) -> Path:
    path = folder / "text.txt"
    path.write_text("".join(chr(32 + 7 * i * i % 90) for i in range(num_bytes)))
    return path


def test_a_text_in_one_window_has_the_perplexity_that_transformers_gives_it(model: Path, tmp_path: Path) -> None:
    path = text_of(tmp_path, 300)
    flags = (f"--text-file={path}", "--dtype=float32", "--quantizations=none", "--window=400", "--stride=200")
    results = results_of("perplexity", model, tmp_path, *flags)
    token_ids = torch.tensor([load_tokenizer(find_model(str(model))).encode(path.read_text(), add_special_tokens=True)])
    with torch.inference_mode():
        wanted = tiny_models.build("grouped")(token_ids, labels=token_ids).loss.exp().item()
    assert results["num_scored"] == 299
    assert results["results"][0]["perplexity"] == pytest.approx(wanted, rel=1e-4)


def test_quantised_weights_are_compared_with_the_first(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (f"--text-file={text_of(tmp_path, 300)}", "--dtype=bfloat16", "--window=64", "--stride=32")
    results = results_of("perplexity", model, tmp_path, *flags)
    assert [found["quantization"] for found in results["results"]] == ["none", "int8", "int4"]
    none, int8, int4 = (found["comparison"] for found in results["results"])
    assert none == {"ratio": 1, "ratio_error": 0, "same_guesses": 1}
    assert int4["same_guesses"] < int8["same_guesses"] < 1
    assert "299 tokens, in windows of 64, one every 32" in capsys.readouterr().out


def test_a_cache_that_does_not_fit_is_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "steps", f"--model={model}", "--curves=batch", "--batch-sizes=1000000000", "--batch-context=512"]
    assert baton.main(argv) == 2
    assert "batch times context must fit into the" in capsys.readouterr().err


def test_handoffs_are_timed_over_both_transports(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = plotted_results_of("handoff", model, tmp_path, "--handoff-lens=16,40", "--handoff-repeats=3")
    found = [(h["transport"], h["num_tokens"], len(h["times_s"])) for h in results["handoffs"]]
    assert found == [("shm", 16, 3), ("shm", 40, 3), ("tcp", 16, 3), ("tcp", 40, 3)]
    block_bytes = results["handoffs"][0]["num_bytes"]
    assert results["handoffs"][1]["num_bytes"] == 3 * block_bytes  # 40 tokens take three blocks of 16
    assert results["connect_s"].keys() == {"shm", "tcp"}
    assert "Handoffs between two processes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["handoff", "--transports=pigeon"], "--transports: got 'pigeon', wanted some of shm, tcp and nixl"),
        (["phases", "--phase-context=8190"], "wanted contexts and prompts of at most the 8192 tokens"),
        (["perplexity", "--text-file=/nowhere.txt"], "--text-file: cannot read /nowhere.txt"),
        (["perplexity", "--window=64", "--stride=64"], "wanted --stride below --window"),
        (["handoff", "--plot=x.gif"], "--plot: got x.gif, wanted a name that ends in .png or .svg"),
        (["handoff", "--plot=/nowhere/x.png"], "wanted a file in a folder that exists"),
    ],
)
def test_unusable_flags_are_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert baton.main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err
