"""`python -m kernels.bench` on sizes that take no time."""

import json
from pathlib import Path

import pytest

from kernels import bench, cpu_bench
from kernels.cpu.library import usable_levels

SMALL = ["--hidden=96", "--heads=6", "--kv-heads=2", "--head-dim=16", "--mlp=80", "--vocab=257", "--rows=3"]


@pytest.fixture(autouse=True)
def one_copy_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_bench, "_COLD_BYTES", 1)


def test_every_op_is_timed_on_every_level_and_by_the_reference(tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    assert bench.main([*SMALL, "--context=20", "--repeats=2", f"--json={path}"]) == 0
    timings = json.loads(path.read_text())["timings"]
    wanted = {(op, kernels) for op in ("attention", "mlp", "head", "argmax") for kernels in usable_levels()}
    wanted |= {(op, "reference") for op in ("attention", "mlp", "head", "argmax")}
    assert {(timing["op"], timing["kernels"]) for timing in timings} == wanted
    assert {len(timing["times_s"]) for timing in timings} == {2}


def test_all_reduces_are_timed_by_both_kinds_of_groups(tmp_path: Path) -> None:
    path = tmp_path / "group.json"
    assert bench.main(["all_reduce", "--ranks=2", "--rows", "1", "5", "--repeats=3", f"--json={path}"]) == 0
    timings = json.loads(path.read_text())
    assert {(each["size"], each["num_rows"], each["group"]) for each in timings} == {
        (2, num_rows, group) for num_rows in (1, 5) for group in ("native", "torch, gloo")
    }
    assert all(len(each["times_s"]) == 3 and min(each["times_s"]) > 0 for each in timings)


def test_sizes_that_the_native_ops_lack_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*SMALL, "--head-dim=20"]) == 1
    assert "head_dim must be a multiple of 16" in capsys.readouterr().err
