"""The embedding of a model whose head has the same weight."""

import pytest
import torch

from kernels.blocks import NormWeight
from kernels.cpu.cores import private_cores
from kernels.cpu.ops import CpuOps

BLOCK_SIZE = 16


def make_ops(dtype: torch.dtype, quantization: str = "none") -> CpuOps:
    return CpuOps(dtype, 64, BLOCK_SIZE, private_cores(1), quantization=quantization)


def make_weight(vocab_size: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(vocab_size, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [64, 75])
@pytest.mark.parametrize("vocab_size", [1, 101, 1000])
def test_an_embedding_tied_to_the_head_has_the_weight_s_rows(vocab_size: int, hidden: int, dtype: torch.dtype) -> None:
    weight = make_weight(vocab_size, hidden, dtype)
    embedding, _ = make_ops(dtype).tied(NormWeight(torch.ones(hidden), 1e-5), weight.clone())
    token_ids = torch.randint(0, vocab_size, (40,), generator=torch.Generator().manual_seed(3))
    rows = embedding(token_ids)
    assert torch.equal(rows, weight[token_ids].float())
    assert rows.is_contiguous()


def test_a_quantised_head_leaves_the_embedding_as_it_is() -> None:
    weight = make_weight(101, 64, torch.bfloat16)
    ops = make_ops(torch.bfloat16, "int8")
    embedding, _ = ops.tied(NormWeight(torch.ones(64), 1e-5), weight.float())
    assert torch.equal(embedding(torch.arange(101)), weight)
