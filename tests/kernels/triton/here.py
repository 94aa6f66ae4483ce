"""What a test's kernels run on."""

import torch

from kernels.triton.gpu import Gpu, gpu_of


def gpu() -> Gpu:
    """That of the device on which tensors are by default: a GPU, or the interpreter (conftest.py)."""
    return gpu_of(torch.get_default_device())
