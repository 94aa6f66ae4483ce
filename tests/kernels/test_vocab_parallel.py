"""Embedding and head in parts. The ranks are threads: to shared memory that makes no difference."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kernels.blocks import LinearWeight, NormWeight
from kernels.composed import ComposedOps
from kernels.cpu.cores import private_cores
from kernels.cpu.group import NativeGroup
from kernels.cpu.group_memory import GroupMemory
from kernels.cpu.library import best_library
from kernels.cpu.ops import CpuOps
from kernels.dispatch import Ops
from kernels.group import Group
from kernels.vocab_parallel import VocabParallelEmbedding, VocabParallelHead

VOCAB_SIZE, HIDDEN = 211, 75
BORDERS = {2: [0, 112, 211], 3: [0, 16, 96, 211]}
"""Of the ranks' parts of the vocabulary, by their number."""


def native_ops() -> Ops:
    return CpuOps(torch.float32, 64, 16, private_cores(1))


def on_every_rank(size: int, task: Callable[[Group, range], Tensor]) -> list[Tensor]:
    """What the task returns at each rank, given its group and its token ids."""
    memory, library = GroupMemory.create(size), best_library()[1]
    groups = [NativeGroup(library, memory, rank, spin=False) for rank in range(size)]
    vocabs = [range(*borders) for borders in zip(BORDERS[size][:-1], BORDERS[size][1:], strict=True)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(task, groups, vocabs))


def make_weight(dtype: torch.dtype) -> Tensor:
    return torch.randn(VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", BORDERS)
def test_every_rank_gets_the_embeddings_of_all_tokens(size: int, dtype: torch.dtype) -> None:
    weight = make_weight(dtype)
    token_ids = torch.cat([torch.arange(VOCAB_SIZE), torch.tensor([0, 210, 15, 16, 0])])

    def embed(group: Group, vocab: range) -> Tensor:
        embedding = ComposedOps().embedding(weight[vocab.start : vocab.stop])
        return VocabParallelEmbedding(embedding, vocab, group)(token_ids)

    for rows in on_every_rank(size, embed):
        assert torch.equal(rows, weight[token_ids])


@pytest.mark.parametrize("make_ops", [native_ops, ComposedOps])
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("size", BORDERS)
def test_the_first_rank_gets_the_logits_of_all_tokens(size: int, num_rows: int, make_ops: Callable[[], Ops]) -> None:
    weight, norm = make_weight(torch.float32), NormWeight(torch.rand(HIDDEN) + 0.5, 1e-5)
    x, residual = torch.randn(2, num_rows, HIDDEN, generator=torch.Generator().manual_seed(1))
    num_columns = [end - begin for begin, end in zip(BORDERS[size][:-1], BORDERS[size][1:], strict=True)]

    def compute(group: Group, vocab: range) -> Tensor:
        head = make_ops().head(norm, LinearWeight(weight[vocab.start : vocab.stop]))
        return VocabParallelHead(head, num_columns, group)(x.clone(), residual.clone())

    logits, *others = on_every_rank(size, compute)
    assert torch.equal(logits, make_ops().head(norm, LinearWeight(weight))(x.clone(), residual.clone()))
    assert all(each.shape == (0, VOCAB_SIZE) for each in others)
