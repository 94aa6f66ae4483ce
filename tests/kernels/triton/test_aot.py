"""Every kernel compiles for GPUs that are not there, in a process without the interpreter; `make aot` has all sizes."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

CASES = {
    "rms_norm": "rms_norm with residual, SmolLM2-135M, bf16",
    "silu_and_mul": "silu_and_mul, SmolLM2-135M, bf16",
    "gelu_and_mul": "gelu_and_mul, SmolLM2-135M, bf16",
    "rope_and_cache": "rope_and_cache, SmolLM2-135M, bf16",
    "decode_attention": "decode_attention, head_dim 128, bf16",
    "prefill_attention": "prefill_attention, head_dim 64, bf16",
    "quantised_linear": "quantised_linear, down of 4 rows, SmolLM2-135M, int4, bf16",
    "staging": "gather_blocks",
    "sample": "sample, SmolLM2-135M",
}
"""By kernel. Decoding also launches the one that puts splits together."""
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx1100")


def test_every_kernel_compiles_for_five_families_and_spills_nothing_on_the_two_that_count() -> None:
    command = [sys.executable, "-m", "kernels.aot", "--report", "--cases", *CASES.values()]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for target in TARGETS:
        for kernel, case in CASES.items():
            assert f"| {kernel} | {case} | {target} |" in done.stdout
        assert f"| reduce_splits | {CASES['decode_attention']} | {target} |" in done.stdout
