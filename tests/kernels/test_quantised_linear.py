"""Weights in 8 and 4 bits: what rounding costs, and the linear against fp64."""

import pytest
import torch

from kernels.quantised_linear import BITS, quantise, quantise_weight, quantised_linear

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative to values of order 1: weights and result are rounded once, sums are fp32."""


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("quantization", "largest"), [("int4", 15), ("int8", 255)])
def test_quantised_weights_are_within_half_a_step(quantization: str, largest: int) -> None:
    weight = torch.randn(7, 64) / 8
    error = (weight - quantise_weight(weight, quantization).dequantise()).abs().unflatten(1, (-1, 32)).amax(-1)
    groups = weight.unflatten(1, (-1, 32))
    step = (groups.amax(-1) - groups.amin(-1)) / largest
    # fp16 holds scale and offset to 2**-11 of themselves.
    assert (error <= step * 0.51 + groups.abs().amax(-1) * 2**-10).all()


def test_weights_that_were_in_q4_1_are_recovered_exactly() -> None:
    scale = (torch.rand(4, 8, 1) * 0.1).half().float()
    offset = (torch.randn(4, 8, 1) * 0.1).half().float()
    q = torch.randint(0, 16, (4, 8, 32))
    q[..., 0], q[..., 1] = 0, 15
    got_q, _, _ = quantise(q * scale + offset, 15)
    assert torch.equal(got_q, q.int())


def test_a_byte_of_four_bits_has_an_input_of_each_half_of_its_group() -> None:
    weight = quantise_weight(torch.arange(16.0).repeat(2).unsqueeze(0), "int4")
    assert weight.integers.tolist() == [[[i | i << 4 for i in range(16)]]]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("quantization", BITS)
def test_the_linear_is_close_to_fp64(quantization: str, dtype: torch.dtype) -> None:
    x, bias = torch.randn(5, 77).to(dtype), torch.randn(33).to(dtype)
    weight = quantise_weight(torch.randn(33, 77) / 77**0.5, quantization)
    out = quantised_linear(x, weight, bias)
    expected = x.double() @ weight.dequantise().double().T + bias.double()
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
