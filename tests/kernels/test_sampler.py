"""The sampler: from sampling parameters to kernels, row by row."""

from typing import Any

import pytest
import torch

from common.engine.sampler import Sampler
from common.engine.step import ScheduledSequence
from common.ids import BlockId, RequestId, SequenceKey
from common.sampling import SamplingParams
from kernels.composed import ComposedOps

VOCAB_SIZE = 64
EOS = 2


def sequence(prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), **params: Any) -> ScheduledSequence:
    """A sequence that has all but its last token in the cache."""
    tokens = prompt + output
    return ScheduledSequence(
        key=SequenceKey(RequestId("r"), 1),
        token_ids=tokens[-1:],
        start=len(tokens) - 1,
        block_table=[BlockId(0)],
        sampling=SamplingParams(max_tokens=100, eos_token_ids=(EOS,), **params),
        prompt_token_ids=prompt,
        output_token_ids=output,
    )


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def sample(logits: torch.Tensor, *sequences: ScheduledSequence) -> list[int]:
    token_ids, failed = Sampler(VOCAB_SIZE, ComposedOps()).sample(logits, sequences)
    assert failed == {}
    return token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_argmax_alone_and_beside_drawn_rows(dtype):
    logits = random_logits(3).to(dtype)
    greedy = sequence(temperature=0.0)
    expected = logits.argmax(1).tolist()
    assert sample(logits, greedy, greedy, greedy) == expected
    assert sample(logits, greedy, sequence(seed=5), greedy)[::2] == expected[::2]


def test_a_resumed_sequence_draws_what_it_would_have_drawn():
    logits = torch.zeros(1, VOCAB_SIZE)
    running = sequence(prompt=(1, 3), output=(4, 5), seed=2**64 - 1)
    resumed = ScheduledSequence(
        key=SequenceKey(RequestId("r"), 2),
        token_ids=(1, 3, 4, 5),
        start=0,
        block_table=[BlockId(0)],
        sampling=running.sampling,
        prompt_token_ids=running.prompt_token_ids,
        output_token_ids=running.output_token_ids,
    )
    assert sample(logits, running) == sample(logits, resumed)


def test_consecutive_positions_draw_other_tokens():
    logits = torch.zeros(1, VOCAB_SIZE)
    drawn = {sample(logits, sequence(output=(3,) * length, seed=1))[0] for length in range(30)}
    assert len(drawn) > 15


def test_end_tokens_are_masked_until_min_tokens_whatever_their_bias():
    logits = torch.zeros(3, VOCAB_SIZE)
    params: dict[str, Any] = {
        "temperature": 0.0,
        "min_tokens": 2,
        "logit_bias": ((EOS, 100.0), (9, 99.0), (7, 1.0)),
        "stop_token_ids": (9,),
    }
    rows = [sequence(**params), sequence(output=(5,), **params), sequence(output=(5, 5), **params)]
    assert sample(logits, *rows) == [7, 7, EOS]


def test_an_ignored_eos_is_not_masked():
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 5, "logit_bias": ((EOS, 100.0),)}
    assert sample(torch.zeros(1, VOCAB_SIZE), sequence(ignore_eos=True, **params)) == [EOS]


def test_penalties_look_at_prompt_or_output_as_each_is_defined():
    logits = torch.zeros(5, VOCAB_SIZE)
    logits[:, 10], logits[:, 11] = 2.0, 1.5
    rows = [
        sequence(prompt=(10,), temperature=0.0, repetition_penalty=2.0),
        sequence(prompt=(10,), temperature=0.0, presence_penalty=1.0),
        sequence(prompt=(1,), output=(10,), temperature=0.0, presence_penalty=1.0),
        sequence(prompt=(1,), output=(10, 10), temperature=0.0, frequency_penalty=0.3),
        sequence(prompt=(1,), output=(10,), temperature=0.0, frequency_penalty=0.3),
    ]
    assert sample(logits, *rows) == [11, 10, 11, 11, 10]


def test_a_row_draws_the_same_token_whatever_is_sampled_beside_it():
    logits = random_logits(6)
    rows = [
        sequence(temperature=0.0),
        sequence(seed=1),
        sequence(seed=2**63 + 5, top_p=0.8, prompt=(5, 6), output=(7, 7), presence_penalty=0.4),
        sequence(seed=3, top_k=4, logit_bias=((11, 3.0),)),
        sequence(seed=4, min_p=0.2, min_tokens=3),
        sequence(temperature=0.0, repetition_penalty=1.2, output=(3, 4)),
    ]
    together = sample(logits, *rows)
    assert [sample(logits[i : i + 1], row)[0] for i, row in enumerate(rows)] == together


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_without_finite_maximum_fails_alone(poison, temperature):
    logits = random_logits(3)
    rows = [sequence(temperature=temperature, seed=seed) for seed in range(3)]
    expected = sample(logits, *rows)
    logits[1, 17] = poison
    token_ids, failed = Sampler(VOCAB_SIZE, ComposedOps()).sample(logits, rows)
    assert [token_ids[0], token_ids[2]] == [expected[0], expected[2]]
    assert token_ids[1] == -1
    assert failed == {1: f"logits must have a finite maximum, got {poison}"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_impossible_tokens_fails(temperature):
    logits = torch.full((1, VOCAB_SIZE), float("-inf"))
    token_ids, failed = Sampler(VOCAB_SIZE, ComposedOps()).sample(logits, [sequence(temperature=temperature)])
    assert (token_ids, list(failed)) == ([-1], [0])


def test_masking_every_possible_token_fails_the_row():
    logits = torch.full((1, VOCAB_SIZE), float("-inf"))
    logits[0, EOS] = 1.0
    _, failed = Sampler(VOCAB_SIZE, ComposedOps()).sample(logits, [sequence(temperature=0.0, min_tokens=1)])
    assert list(failed) == [0]


def test_logits_are_not_changed():
    logits = random_logits(1)
    before = logits.clone()
    sample(logits, sequence(logit_bias=((3, 5.0),), repetition_penalty=1.5, min_tokens=4, top_k=3))
    assert torch.equal(logits, before)


def test_nothing_to_sample_is_answered_with_nothing():
    assert Sampler(VOCAB_SIZE, ComposedOps()).sample(torch.empty(0, VOCAB_SIZE), []) == ([], {})
