"""The ops between attention and attention: against fp64, and bit for bit against transformers in fp32."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from kernels.gelu_and_mul import gelu_and_mul
from kernels.linear import pack_linear
from kernels.rms_norm import rms_norm
from kernels.rope_and_cache import rope_and_cache
from kernels.silu_and_mul import silu_and_mul
from tests.kernels.paged import make_kv

DTYPES = [torch.float32, torch.bfloat16]
# Relative to values of order 1. bfloat16: two roundings of 2**-9, of a factor or summand and of the result.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_equals_transformers_bit_for_bit_in_fp32(with_residual):
    x, weight = torch.randn(7, 577), torch.randn(577)
    residual = torch.randn(7, 577) if with_residual else None
    expected_sum = x if residual is None else residual + x
    norm = LlamaRMSNorm(577, eps=1e-5)
    norm.weight.data.copy_(weight)
    out, new_residual = rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(out, norm(expected_sum))
    assert torch.equal(new_residual, expected_sum)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_close_to_fp64(dtype):
    x, residual = torch.randn(5, 96).to(dtype), torch.randn(5, 96).to(dtype)
    weight = torch.rand(96).to(dtype)
    out, new_residual = rms_norm(x, weight, 1e-6, residual)
    total = (x + residual).double()
    expected = total / (total.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert out.dtype == new_residual.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_is_close_to_fp64(dtype):
    x = torch.randn(5, 2 * 33).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    out = silu_and_mul(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_and_mul_is_close_to_fp64(dtype):
    x = torch.randn(5, 2 * 33).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    gelu = gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2
    out = gelu_and_mul(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), gelu * up, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def make_cos_sin(max_positions: int, head_dim: int) -> torch.Tensor:
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(max_positions).unsqueeze(0))
    half = head_dim // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rope_equals_transformers_bit_for_bit_in_fp32(head_dim):
    positions = torch.tensor([0, 5, 99, 3, 500])
    q, k = torch.randn(5, 6, head_dim), torch.randn(5, 2, head_dim)
    cos_sin = make_cos_sin(512, head_dim)
    kv = make_kv(2, 2, 16, head_dim, torch.float32)
    got_q, got_k = rope_and_cache(q, k, k, cos_sin, positions, kv, torch.arange(5))
    cos, sin = (half.repeat(1, 2).unsqueeze(0) for half in cos_sin[positions].chunk(2, dim=-1))
    want_q, want_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    assert torch.equal(got_q, want_q[0].transpose(0, 1))
    assert torch.equal(got_k, want_k[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_is_close_to_fp64(dtype):
    positions = torch.tensor([7, 300])
    q, k = torch.randn(2, 3, 64).to(dtype), torch.randn(2, 1, 64).to(dtype)
    cos_sin = make_cos_sin(512, 64)
    got_q, _ = rope_and_cache(q, k, k, cos_sin, positions, make_kv(1, 1, 16, 64, dtype), torch.arange(2))
    turns = torch.complex(*cos_sin[positions].double().unsqueeze(1).chunk(2, dim=-1))
    turned = torch.complex(*q.double().chunk(2, dim=-1)) * turns
    assert got_q.dtype == dtype
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(got_q.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_keys_and_values_land_in_their_slots_and_nowhere_else(dtype):
    kv = make_kv(5, 2, 4, 8, dtype, fill=7.0)
    slots = [13, 0, 19, 6]
    k, v = torch.randn(4, 2, 8).to(dtype), torch.randn(4, 2, 8).to(dtype)
    cos_sin, positions = make_cos_sin(32, 8), torch.tensor([3, 4, 5, 31])
    _, rotated = rope_and_cache(k, k, v, cos_sin, positions, kv, torch.tensor(slots))
    got_k, got_v = kv.read(torch.arange(5).unsqueeze(0))
    expected_k, expected_v = torch.full_like(got_k, 7.0), torch.full_like(got_v, 7.0)
    for token, slot in enumerate(slots):
        expected_k[0, :, slot], expected_v[0, :, slot] = rotated[token], v[token]
    assert torch.equal(got_k, expected_k)
    assert torch.equal(got_v, expected_v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 37])
def test_packed_linear_is_close_to_fp64(num_tokens, with_bias, dtype):
    x, weight = torch.randn(num_tokens, 93).to(dtype), (torch.randn(61, 93) / 93**0.5).to(dtype)
    bias = torch.randn(61).to(dtype) if with_bias else None
    out = pack_linear(weight, bias)(x)
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    assert out.dtype == dtype
    # bfloat16 rounds only the result: sums are fp32.
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_packed_linear_reads_a_strided_input():
    x, weight = torch.randn(93, 5).T, torch.randn(61, 93) / 93**0.5
    torch.testing.assert_close(pack_linear(weight)(x), F.linear(x, weight), rtol=1e-5, atol=1e-5)
