"""The kernel that samples: the very tokens of the reference, and Philox's bits."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from kernels import sample as reference
from kernels.philox import MASK, philox4x32
from kernels.sample import Draws
from kernels.triton.sample import philox_words, sample
from tests.kernels.triton.here import gpu

pytestmark = pytest.mark.usefixtures("device")


@triton.jit
def philox_kernel(seed_ptr, position_ptr, out_ptr, first, GROUPS: tl.constexpr):
    groups = first + tl.arange(0, GROUPS)
    words = philox_words(tl.load(seed_ptr), tl.load(position_ptr), groups)
    places = tl.arange(0, GROUPS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out_ptr + places, words.to(tl.int64))


@pytest.mark.parametrize("seed", [0, 42, -1, -(2**63), 0x123456789ABCDEF])
@pytest.mark.parametrize("position", [0, 2**31, 5 * 2**32 + 3])
def test_philox_is_the_cpus_bit_for_bit(seed, position):
    words = torch.empty(8, 4, dtype=torch.int64)
    philox_kernel[(1,)](torch.tensor([seed]), torch.tensor([position]), words, 30_000, GROUPS=8)
    groups = torch.arange(30_000, 30_008)
    counter = torch.stack((groups, *(torch.full_like(groups, x) for x in (position & MASK, position >> 32, 0))), dim=1)
    assert torch.equal(words, philox4x32(counter, torch.tensor([seed & MASK, (seed >> 32) & MASK])))


def make_draws(num_rows: int, **columns: float | Tensor) -> Draws:
    defaults: dict[str, float | Tensor] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
    dtypes = {"top_k": torch.int64, "seed": torch.int64, "position": torch.int64}
    given = defaults | {"position": torch.arange(num_rows)} | columns
    return Draws(
        **{
            name: torch.as_tensor(value, dtype=dtypes.get(name, torch.float32)).expand(num_rows)
            for name, value in given.items()
        }
    )


def random_logits(num_rows: int, vocab_size: int) -> Tensor:
    """The same everywhere."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1), device="cpu")
    return 3 * logits.to(torch.get_default_device())


def assert_same_tokens(logits: Tensor, draws: Draws) -> None:
    assert sample(logits, draws, gpu()).tolist() == reference.sample(logits, draws).tolist()


# Tokens are the same unless noise or mass of two is equal to about 1e-6 of itself, which is so for none of these seeds.
@pytest.mark.parametrize(
    "columns",
    [
        {"temperature": 0.0},
        {},
        {"temperature": 0.3},
        {"temperature": 1e-30},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 10_000},
        {"top_p": 0.0},
        {"top_p": 0.5},
        {"top_p": 0.95, "temperature": 2.0},
        {"min_p": 0.1, "temperature": 1.5},
        {"top_k": 7, "top_p": 0.7},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
        {"min_p": 0.05, "top_p": 0.8},
        {"min_p": 0.2, "top_p": 0.3, "temperature": 3.0},  # min_p leaves a third of the mass
    ],
    ids=str,
)
def test_tokens_are_those_of_the_reference(columns):
    assert_same_tokens(random_logits(3, 300), make_draws(3, **columns))


def test_of_equal_most_likely_tokens_the_first_is_taken():
    # In one tile, and in two.
    logits = torch.zeros(2, 600)
    logits[0, [7, 9, 300]] = logits[1, 300] = logits[1, 500] = 1.0
    assert sample(logits, make_draws(2, temperature=0.0), gpu()).tolist() == [7, 300]


def test_a_vocabulary_of_one_token_leaves_no_choice():
    assert_same_tokens(random_logits(1, 1), make_draws(1, top_k=1, top_p=0.5))


@pytest.mark.parametrize("columns", [{"top_k": 3}, {"top_p": 0.3}, {"top_k": 30, "top_p": 0.5}], ids=str)
def test_of_equal_logits_the_lower_ids_stay(columns):
    assert_same_tokens(random_logits(2, 300).round(), make_draws(2, temperature=2.0, **columns))
    assert_same_tokens(torch.zeros(1, 300), make_draws(1, **columns))


def test_impossible_tokens_are_not_drawn():
    logits = torch.full((2, 300), float("-inf"))
    logits[:, 270:] = random_logits(2, 30)
    for columns in ({}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}):
        assert_same_tokens(logits, make_draws(2, **columns))


def test_every_row_has_its_own_draw():
    draws = make_draws(
        5,
        temperature=torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0]),
        top_k=torch.tensor([0, 3, 0, 9, 0]),
        top_p=torch.tensor([1.0, 1.0, 0.6, 0.9, 1.0]),
        seed=torch.tensor([1, 2, -3, 4, 2**62]),
    )
    assert_same_tokens(random_logits(5, 400), draws)


def test_no_rows_give_no_tokens():
    assert sample(torch.empty(0, 10), make_draws(0), gpu()).shape == (0,)
