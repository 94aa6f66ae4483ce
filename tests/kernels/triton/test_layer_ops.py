"""The kernels between attention and attention, and the copies of blocks, against their references."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from kernels import gelu_and_mul as gelu_module
from kernels import rms_norm as rms_norm_module
from kernels import rope_and_cache as rope_module
from kernels import silu_and_mul as silu_module
from kernels import staging as staging_module
from kernels.triton.gelu_and_mul import gelu_and_mul
from kernels.triton.rms_norm import rms_norm
from kernels.triton.rope_and_cache import rope_and_cache
from kernels.triton.silu_and_mul import silu_and_mul
from kernels.triton.staging import gather_blocks, scatter_blocks
from tests.kernels.paged import make_kv
from tests.kernels.triton.here import gpu

pytestmark = pytest.mark.usefixtures("device")

# Relative to values of order 1. 16 bits: where fp32 sums differ in order, a rounding may fall to the other side, once
# of a factor and once of the result.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_equals_the_reference(with_residual, dtype):
    # Rows of views, so that what lies between them must not count.
    x, residual = torch.randn(5, 150).to(dtype)[:, :97], torch.randn(5, 130).to(dtype)[:, :97]
    weight = torch.rand(97).to(dtype)
    given = residual if with_residual else None
    out, total = rms_norm(x, weight, 1e-5, given, gpu())
    expected_out, expected_total = rms_norm_module.rms_norm(x, weight, 1e-5, given)
    assert_close(out, expected_out)
    assert torch.equal(total, expected_total)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_silu_and_mul_equals_the_reference(dtype):
    x = (torch.randn(3, 2 * 77) * 4).to(dtype)
    assert_close(silu_and_mul(x, gpu()), silu_module.silu_and_mul(x))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gelu_and_mul_equals_the_reference(dtype):
    x = (torch.randn(3, 2 * 77) * 4).to(dtype)
    assert_close(gelu_and_mul(x, gpu()), gelu_module.gelu_and_mul(x))


@pytest.mark.filterwarnings("ignore:overflow")  # of numpy: to infinity, which is what is wanted
@pytest.mark.parametrize("activate", [silu_and_mul, gelu_and_mul])
def test_activations_of_the_largest_gates_stay_finite(activate):
    gate = torch.tensor([[-3e38, -1e20, -100.0, 0.0, 100.0, 1e20, 3e38]])
    out = activate(torch.cat((gate, torch.ones(1, 7)), dim=1), gpu())
    assert_close(out, gate.clamp(min=0))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 16), (6, 2, 20), (4, 1, 80), (8, 1, 64)])
def test_rope_and_cache_equals_the_reference(num_heads, num_kv_heads, head_dim, dtype):
    counts = [num_heads, num_kv_heads, num_kv_heads]
    q, k, v = torch.randn(5, sum(counts), head_dim).to(dtype).split(counts, dim=1)
    angles = torch.rand(300, head_dim // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions, slots = torch.tensor([0, 7, 299, 3, 8]), torch.tensor([33, 0, 15, 16, 47])
    expected_kv, kv = (make_kv(3, num_kv_heads, 16, head_dim, dtype) for _ in range(2))
    expected = rope_module.rope_and_cache(q, k, v, cos_sin, positions, expected_kv, slots)
    actual = rope_and_cache(q, k, v, cos_sin, positions, kv, slots, gpu())
    for mine, other in zip(actual, expected, strict=True):
        assert_close(mine, other)
    # In all other slots NaN has stayed.
    torch.testing.assert_close(kv.keys, expected_kv.keys, equal_nan=True, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(bits(kv.values), bits(expected_kv.values))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gathered_blocks_equal_the_reference_to_the_bit(dtype):
    blocks, block_ids = random_bits(7, 5, 100, dtype=dtype), torch.tensor([6, 0, 3])
    staging, expected = (torch.zeros(3, 2, 100, dtype=dtype) for _ in range(2))
    gather_blocks(blocks, block_ids, 1, staging, gpu())
    staging_module.gather_blocks(blocks, block_ids, 1, expected)
    assert torch.equal(bits(staging), bits(expected))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scattered_blocks_go_to_their_heads_and_nowhere_else(dtype):
    blocks, block_ids = random_bits(7, 5, 100, dtype=dtype), torch.tensor([6, 0, 3])
    expected, staging = blocks.clone(), random_bits(3, 2, 100, dtype=dtype)
    scatter_blocks(staging, blocks, block_ids, 3, gpu())
    staging_module.scatter_blocks(staging, expected, block_ids, 3)
    assert torch.equal(bits(blocks), bits(expected))


def test_steps_without_rows_are_answered_with_nothing():
    none = torch.empty(0, 16)
    assert rms_norm(none, torch.ones(16), 1e-5, None, gpu())[0].shape == (0, 16)
    assert silu_and_mul(none, gpu()).shape == (0, 8)
    assert gelu_and_mul(none, gpu()).shape == (0, 8)
    gather_blocks(torch.zeros(2, 1, 8), torch.empty(0, dtype=torch.int64), 0, torch.empty(0, 1, 8), gpu())


def random_bits(*shape: int, dtype: torch.dtype) -> Tensor:
    """Any bits, NaN among them."""
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
