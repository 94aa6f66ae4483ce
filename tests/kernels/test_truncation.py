"""top_k, top_p and min_p keep exactly the tokens that a naive reading of their definitions keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import truncation
from kernels.truncation import truncate
from tests.kernels import naive_sampling

# Sums in another order may move a cut that falls onto a token's edge; these values fall on none.
FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (7, 1.0, 0.0),
    (10_000, 1.0, 0.0),
    (0, 0.9001, 0.0),
    (0, 1e-9, 0.0),
    (0, 0.99999, 0.0),
    (0, 1.0, 0.0503),
    (0, 1.0, 1.0),
    (40, 0.8003, 0.0),
    (40, 0.9507, 0.0201),
    (0, 0.7009, 0.1003),
    (1500, 0.2003, 0.0),
    (2500, 0.9003, 0.0),
]


def kept(logits: Tensor, filters: list[tuple[int, float, float]]) -> list[set[int]]:
    top_k, top_p, min_p = zip(*filters, strict=True)
    result = truncate(logits, torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))
    is_kept = result > float("-inf")
    assert torch.equal(result[is_kept], logits[is_kept])
    return [set(row.nonzero().flatten().tolist()) for row in is_kept]


def normalized(logits: Tensor) -> Tensor:
    return logits - logits.amax(1, keepdim=True)


# Below the narrow width, above it with cuts inside, and flat enough for cuts beyond it.
@pytest.mark.parametrize(("vocab_size", "spread"), [(50, 3.0), (5000, 3.0), (5000, 0.5)])
def test_the_support_is_exactly_the_naive_one(vocab_size, spread):
    random = torch.Generator().manual_seed(vocab_size)
    logits = normalized(torch.randn(len(FILTERS), vocab_size, generator=random) * spread)
    expected = [naive_sampling.support(row.tolist(), *one) for row, one in zip(logits, FILTERS, strict=True)]
    assert kept(logits, FILTERS) == expected


@pytest.mark.parametrize("narrow", [8, 1024])
def test_equal_logits_stay_by_lower_id(monkeypatch, narrow):
    monkeypatch.setattr(truncation, "NARROW", narrow)
    # Two tokens of weight 1 among 18 of weight 1/2: a mass of 11, of which 0.48 needs the two and seven more.
    logits = torch.tensor([0.0, -1.0, 0.0, -1.0] + [-1.0] * 16) * 0.6931471805599453
    filters = [(1, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.1, 0.0), (12, 1.0, 0.0), (0, 0.48, 0.0)]
    assert kept(logits.expand(5, -1), filters) == [{0}, {0, 1, 2}, {0, 2}, set(range(12)), set(range(9))]


def test_a_row_keeps_the_same_tokens_in_any_batch():
    random = torch.Generator().manual_seed(1)
    logits = normalized(torch.randn(len(FILTERS), 5000, generator=random))
    together = kept(logits, FILTERS)
    alone = [kept(logits[row : row + 1], [one])[0] for row, one in enumerate(FILTERS)]
    assert together == alone


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.integers(-40, 0), min_size=1, max_size=60),
    top_k=st.integers(0, 70),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_top_k_and_min_p_agree_with_the_naive_reading_also_among_ties(steps, top_k, min_p):
    logits = normalized(torch.tensor([steps], dtype=torch.float32) / 4)
    assert kept(logits, [(top_k, 1.0, min_p)]) == [naive_sampling.support(logits[0].tolist(), top_k, 1.0, min_p)]


def test_impossible_tokens_do_not_disturb_the_others():
    logits = torch.full((1, 3000), float("-inf"))
    logits[0, [5, 2000, 2999]] = torch.tensor([0.0, -0.5, -5.0])
    assert kept(logits, [(0, 0.95, 0.0)]) == [{5, 2000}]
