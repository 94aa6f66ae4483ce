"""The linear of weights in 8 and 4 bits against its reference."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from kernels import quantised_linear as reference
from kernels.quantised_linear import BITS, QuantisedWeight, quantise_weight
from kernels.triton.quantised_linear import quantised_linear
from tests.kernels.triton.here import gpu

pytestmark = pytest.mark.usefixtures("device")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative to values of order 1. 16 bits: where fp32 sums differ in order, the rounding of the result may fall to the
other side; a weight between two values of its dtype may do so too."""


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def make_weight(out_size: int, in_size: int, quantization: str) -> QuantisedWeight:
    return quantise_weight(torch.randn(out_size, in_size) / in_size**0.5, quantization)


def make_rows(num_tokens: int, size: int, dtype: torch.dtype) -> Tensor:
    """The first part of rows that go on with NaN."""
    rows = torch.full((num_tokens, size + 43), float("nan"), dtype=dtype)
    rows[:, :size] = torch.randn(num_tokens, size)
    return rows[:, :size]


def assert_equal_to_reference(x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> None:
    actual, expected = quantised_linear(x, weight, bias, gpu()), reference.quantised_linear(x, weight, bias)
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("quantization", BITS)
@pytest.mark.parametrize(
    ("num_tokens", "in_size", "out_size"),
    [(1, 64, 32), (3, 77, 33), (16, 32, 1), (17, 160, 70), (37, 1, 32)],
)
def test_odd_sizes_equal_the_reference(num_tokens, in_size, out_size, quantization, dtype):
    x = make_rows(num_tokens, in_size, dtype)
    assert_equal_to_reference(x, make_weight(out_size, in_size, quantization), torch.randn(out_size).to(dtype))


@pytest.mark.parametrize("quantization", BITS)
def test_a_bias_may_be_missing(quantization):
    assert_equal_to_reference(make_rows(3, 77, torch.float32), make_weight(33, 77, quantization), None)


@pytest.mark.parametrize("quantization", BITS)
def test_every_weight_meets_its_own_input(quantization):
    weight = make_weight(40, 70, quantization)
    out = quantised_linear(torch.eye(70), weight, None, gpu())
    torch.testing.assert_close(out, weight.dequantise().T, rtol=1e-6, atol=1e-6)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    x, weight = make_rows(33, 96, torch.float32), make_weight(48, 96, "int8")
    together = quantised_linear(x, weight, None, gpu())
    x[:20] = float("nan")
    assert torch.equal(quantised_linear(x, weight, None, gpu())[20:], together[20:])


def test_no_rows_give_no_rows():
    assert quantised_linear(torch.empty(0, 64), make_weight(7, 64, "int4"), None, gpu()).shape == (0, 7)
