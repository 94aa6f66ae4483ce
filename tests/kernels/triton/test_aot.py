"""Kernels compile for GPUs that are not there, in a process without the interpreter; `make aot` compiles them all."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize("case", ["rope_and_cache, SmolLM2-135M, bf16", "decode_attention, head_dim 128, bf16"])
def test_a_kernel_compiles_for_nvidia_and_amd_without_spills(case: str) -> None:
    command = [sys.executable, "-m", "kernels.aot", "--report", "--targets", "sm_90", "gfx942", "--cases", case]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernel = case.partition(",")[0]
    assert f"| {kernel} | {case} | sm_90 |" in done.stdout
    assert f"| {kernel} | {case} | gfx942 |" in done.stdout
