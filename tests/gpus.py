"""Whether tests that need a GPU can run here."""

import os

import pytest
import torch


def skip_without_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip(f"PyTorch {torch.__version__} finds no GPU")
    if os.environ["TRITON_INTERPRET"] != "0":  # tests/conftest.py turns it on
        pytest.skip("Triton's kernels are interpreted: TRITON_INTERPRET=0 runs them on the GPU")
