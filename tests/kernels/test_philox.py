"""Philox4x32-10 against Random123's known answers, and the noise made of it."""

import math

import pytest
import torch

from kernels.philox import MAX_GUMBEL, gumbel_noise, philox4x32

# Source: Random123, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> torch.Tensor:
    return torch.tensor([int(word, 16) for word in text.split()])


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers_come_out(counter, key, result):
    assert torch.equal(philox4x32(words(counter), words(key)), words(result))


def test_a_batch_of_counters_gives_the_known_answers_too():
    counters, keys, results = (
        torch.stack([words(text) for text in column]) for column in zip(*KNOWN_ANSWERS, strict=True)
    )
    assert torch.equal(philox4x32(counters, keys), results)


def test_noise_is_made_of_the_documented_key_counter_and_word():
    seed, position, token_id = 0xFEDCBA9876543210, 5 * 2**32 + 7, 4 * 1234 + 2
    noise = gumbel_noise(torch.tensor([seed - 2**64]), torch.tensor([position]), torch.tensor([1234]))
    word = int(philox4x32(torch.tensor([1234, 7, 5, 0]), torch.tensor([0x76543210, 0xFEDCBA98]))[token_id % 4])
    uniform = ((word >> 9) + 0.5) / 2**23
    assert noise[0, 2].item() == pytest.approx(-math.log(-math.log(uniform)), rel=1e-5)


def test_extreme_words_give_finite_noise_below_the_stated_maximum(monkeypatch):
    extremes = torch.tensor([[0, 0xFFFFFFFF, 1, 0xFFFFFE00]])
    monkeypatch.setattr("kernels.philox.philox4x32", lambda counter, key: extremes)
    noise = gumbel_noise(torch.tensor([0]), torch.tensor([0]), torch.tensor([0]))
    assert torch.isfinite(noise).all()
    assert noise.max().item() < MAX_GUMBEL


def test_noise_has_the_moments_of_a_gumbel_distribution():
    num_groups = 50_000
    zeros = torch.zeros(num_groups, dtype=torch.int64)
    noise = gumbel_noise(zeros + 42, zeros + 3, torch.arange(num_groups)).flatten().double()
    # Standard errors of 200,000 draws: 0.003 of the mean, 0.009 of the variance; four of each.
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.012)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.036)
