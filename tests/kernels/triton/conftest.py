"""What Triton's interpreter (3.9), which tests/conftest.py turns on, does not do as a GPU does: bfloat16."""

from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def bfloat16_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps it in integers. It multiplies these as integers, and cuts bits off where a GPU rounds."""
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
