"""Where kernels are tested: in Triton's interpreter, which tests/conftest.py turns on, and on a GPU, if asked for."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts tensors by default where the kernels run."""
    if request.param == "interpreter":
        compute_bfloat16_as_a_gpu_does(monkeypatch)
        yield
        return
    if not torch.cuda.is_available():
        pytest.skip(f"PyTorch {torch.__version__} finds no GPU")
    if pytest.importorskip("triton").knobs.runtime.interpret:
        pytest.skip("kernels are interpreted: TRITON_INTERPRET=0 runs them on the GPU")
    with torch.device("cuda"):
        yield


def compute_bfloat16_as_a_gpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter (3.9) keeps it in integers. It multiplies these as integers, and cuts off what a GPU rounds."""
    tl = pytest.importorskip("triton.language")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle
    multiply, cast = builder.create_dot, builder.cast_impl

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return handle_of((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: object) -> Any:
        return multiply(self, widen(a), widen(b), *others)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
        return handle_of(rounded.numpy().view(np.uint16), tl.bfloat16)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "cast_impl", cast_impl)
