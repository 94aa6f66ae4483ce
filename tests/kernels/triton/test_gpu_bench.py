"""What is timed on a GPU: all who compute an op get the same, and figures follow from times."""

import argparse
from collections.abc import Callable, Sequence

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernels import gpu_bench
from kernels.bench_sizes import Sizes
from kernels.gpu_cases import CASES, Setup
from kernels.work import Peaks

SMALL = Sizes(hidden=96, heads=6, kv_heads=2, head_dim=64, mlp=80, vocab=257, rows=3, context=37)


def make_setup() -> Setup:
    torch.manual_seed(0)
    return gpu_bench.make_setup(SMALL, torch.float32, torch.get_default_device())


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("op", CASES)
def test_all_who_are_timed_compute_the_same(op: str) -> None:
    for case in CASES[op](make_setup()):
        runs = dict(case.runs)
        if op == "sample":
            runs.pop("torch", None)  # draws by other noise
        outs = {name: run().clone() for name, run in runs.items()}
        for out in outs.values():
            torch.testing.assert_close(out, outs["reference"], rtol=2e-4, atol=2e-4, msg=f"{case.op}, {case.what}")
        assert set(case.runs) >= {"triton", "reference"}


def test_figures_follow_from_the_median_the_work_and_the_peaks() -> None:
    def timer(run: Callable[[], object]) -> Sequence[float]:
        run()
        return [1e-3, 2e-6, 2e-6]

    peaks = Peaks(gbps=1.0, tflops=1.0, tflops_fp32=1.0)
    first = next(gpu_bench.measure(["rms_norm"], make_setup(), timer, peaks)).figures()
    num_bytes = 3 * 96 * 4 * 4
    assert (first["op"], first["case"], first["kernels"]) == ("rms_norm", "3 tokens, residual", "triton")
    assert first["median_us"] == pytest.approx(2)
    assert first["gb_per_s"] == pytest.approx(num_bytes / 2e-6 / 1e9)
    assert first["share_of_roofline"] == pytest.approx(num_bytes / 1e9 / 2e-6)
    assert first["time_to_torchs"] == 1.0


def test_without_peaks_and_without_an_op_of_pytorchs_there_is_nothing_to_compare_with() -> None:
    row = next(gpu_bench.measure(["rope_and_cache"], make_setup(), lambda run: [1.0], None)).figures()
    assert gpu_bench.cells(row)[-2:] == ["-", "-"]


def test_what_is_known_of_a_device_may_be_given_instead() -> None:
    known = gpu_bench.find_peaks("NVIDIA H200", None, None)
    assert known is not None
    assert gpu_bench.find_peaks("NVIDIA H200", 4000, None) == Peaks(4000, known.tflops, known.tflops_fp32)
    assert gpu_bench.find_peaks("of nobody", 4000, 500) == Peaks(4000, 500, 500)
    assert gpu_bench.find_peaks("of nobody", 4000, None) is None
    assert gpu_bench.find_peaks("of nobody", None, None) is None


def test_caches_are_flushed_before_each_sample_and_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            happened.append("event")

        def elapsed_time(self, end: "Event") -> float:
            return 5.0

    monkeypatch.setattr(gpu_bench, "_FLUSHED_BYTES", 8)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: happened.append("wait"))
    timer = gpu_bench.CudaTimer(torch.device("cpu"), 2)
    zero = torch.Tensor.zero_
    monkeypatch.setattr(torch.Tensor, "zero_", lambda tensor: happened.append("flush") or zero(tensor))
    assert timer(lambda: happened.append("run")) == [5e-3, 5e-3]
    assert happened[5:] == ["wait", *["flush", "event", "run", "event"] * 2, "wait"]


def test_where_there_is_no_gpu_the_command_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_bench.main([], argparse.ArgumentParser(add_help=False)) == 1
    assert "there is no GPU: PyTorch" in capsys.readouterr().err
