"""What runs on a GPU alone; kernels by themselves are tested in tests/kernels/triton."""

from pathlib import Path

import pytest
import torch

from tests.gpu.model import save_model
from tests.gpus import skip_without_gpu


@pytest.fixture(scope="session")
def device() -> torch.device:
    skip_without_gpu()
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def model(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder
