"""What `make gpu-check` reads and writes, and that it runs nothing where there is no GPU."""

import json
import sys
from pathlib import Path

import pytest

from tests.gpu import check
from tests.gpu.check import Part

RESULTS = """<testsuites><testsuite tests="7" failures="1" errors="1" skipped="2"><testcase name="leak"><properties>
<property name="bytes" value="12"/></properties></testcase></testsuite></testsuites>"""
ROW = {
    "op": "rms_norm",
    "case": "3 tokens",
    "kernels": "triton",
    "median_us": 2.0,
    "gb_per_s": 10.0,
    "tflop_per_s": 1.0,
    "share_of_roofline": None,
    "time_to_torchs": 1.5,
}


def test_results_of_tests_are_counted_and_what_they_noted_is_kept() -> None:
    counts = {"passed": 3, "failures": 1, "errors": 1, "skipped": 2}
    assert check.read_results(RESULTS) == (counts, {"bytes": "12"})


def test_what_is_required_is_what_the_project_declares() -> None:
    names = check.requirements((check.ROOT / "pyproject.toml").read_text())
    assert {"torch", "triton", "msgspec", "pytest"} <= set(names)
    assert check.find_versions(["torch", "of-nobody-at-all"])["of-nobody-at-all"] is None


def test_a_part_that_takes_too_long_is_ended_with_what_it_started() -> None:
    is_ok, duration_s, tail = check.run([sys.executable, "-c", "print('begun'); import signal; signal.pause()"], 3.0)
    assert not is_ok
    assert duration_s < 60
    assert "begun" in tail
    assert "ended after its limit of 3 s" in tail


def test_both_files_have_what_passed_what_failed_and_the_figures(tmp_path: Path) -> None:
    parts = [Part("stack", False, 5.0, {"passed": 1, "failures": 1}, {"bytes": "12"}, tail="boom")]
    parts.append(Part("bench rms_norm", True, 2.0, timings=[ROW]))
    check.write(tmp_path, "some GPU", {"triton": "3", "transformers": None}, parts)
    kept = json.loads((tmp_path / "gpu-check.json").read_text())
    assert kept["device"] == "some GPU"
    assert [part["is_ok"] for part in kept["parts"]] == [False, True]
    table = (tmp_path / "gpu-check.md").read_text()
    assert "| stack | FAILED | 5 | 1 passed, 1 failures |" in table
    assert "| rms_norm | 3 tokens | triton | 2.0 | 10 | 1.0 | - | 1.50 |" in table
    for shown in ("Missing: transformers.", "boom", "bytes: 12"):
        assert shown in table


def test_without_a_gpu_nothing_runs_and_both_files_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "device_name", lambda: None)
    assert check.main([f"--out={tmp_path}"]) == 1
    assert "there is no GPU" in capsys.readouterr().out
    assert (tmp_path / "gpu-check.md").read_text().startswith("# No GPU")
    assert json.loads((tmp_path / "gpu-check.json").read_text())["parts"] == []
