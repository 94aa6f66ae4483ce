"""What holds for tests of the real stack."""

import pytest
import torch

from common.machine import num_available_cores


@pytest.fixture(scope="session", autouse=True)
def reference_on_all_cores() -> None:
    """While transformers computes what the stack is compared with, the stack rests."""
    torch.set_num_threads(num_available_cores())
