"""The pure parts of the commands that look at the engine from inside."""

import math

import numpy as np
import pytest

from bench.inside.curves import Curve, Point
from bench.inside.decode_worker import num_cache_blocks, start_worker
from bench.inside.plans import decode_plan, num_blocks_for, prompt_plan, prompt_tokens
from bench.inside.windows import Scores, Window, compare, cut_windows, join
from bench.inside.work import decode_shape, prompt_shape, work_of_phases
from common.engine.model_config import ModelConfig
from common.engine.rope import DefaultRope
from tests.fakes import fake_layout

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope=DefaultRope(),
    attention_bias=False,
    mlp_bias=False,
    tie_word_embeddings=True,
    sliding_window=None,
)


def curve(*points: tuple[int, float]) -> Curve:
    return Curve("batch", "Steps", "sequences", [Point(size, size, size, size, [time_s]) for size, time_s in points])


def test_exponents_say_how_a_time_grows_between_two_points() -> None:
    assert curve((1, 3.0), (2, 3.0), (4, 6.0), (12, 54.0)).exponents() == pytest.approx([0, 1, 2])
    assert curve((4, 1.0)).exponents() == []


def test_a_point_whose_median_is_far_above_its_fastest_is_unsteady() -> None:
    assert Point(1, 1, 1, 1, [1.0, 2.3, 2.4]).is_unsteady
    assert not Point(1, 1, 1, 1, [1.0, 1.1, 9.0]).is_unsteady


def test_a_decode_plan_computes_the_last_token_of_contexts_that_share_no_block() -> None:
    plan = decode_plan(batch=3, context=33, block_size=16)
    assert plan.num_tokens == 3
    assert {sequence.start for sequence in plan.sequences} == {32}
    block_ids = [block_id for sequence in plan.sequences for block_id in sequence.block_table]
    assert block_ids == list(range(num_blocks_for(3, 33, 16)))


def test_a_prompt_plan_has_blocks_for_what_was_computed_before() -> None:
    (sequence,) = prompt_plan([5, 6, 7], start=30, block_size=16).sequences
    assert (sequence.start, list(sequence.token_ids), len(sequence.block_table)) == (30, [5, 6, 7], 3)


def test_prompt_tokens_are_spread_over_the_vocabulary() -> None:
    token_ids = prompt_tokens(1000, 49152)
    assert len(set(token_ids)) == 1000
    assert max(token_ids) > 40_000
    assert max(prompt_tokens(1000, 257)) < 257


@pytest.mark.parametrize("num_tokens", [2, 7, 8, 9, 12, 13, 100])
@pytest.mark.parametrize("stride", [1, 3, 7])
def test_windows_score_every_token_but_the_first_once(num_tokens: int, stride: int) -> None:
    windows = cut_windows(num_tokens, 8, stride)
    scored = [index for window in windows for index in range(window.first_scored, window.end)]
    assert scored == list(range(1, num_tokens))
    assert all(window.start < window.first_scored and window.end - window.start <= 8 for window in windows)


def test_a_window_begins_a_stride_after_the_one_before() -> None:
    assert cut_windows(12, 8, 4) == [Window(0, 8, 1), Window(4, 12, 8)]


def scores(surprises: list[float], guesses: list[int]) -> Scores:
    return Scores(np.array(surprises), np.array(guesses))


def test_perplexity_is_the_geometric_mean_of_how_many_tokens_seemed_possible() -> None:
    assert scores([math.log(2), math.log(8)], [0, 0]).perplexity == pytest.approx(4)


def test_a_constant_difference_has_no_error() -> None:
    base = scores([1.0, 5.0, 3.0], [1, 2, 3])
    found = compare(scores([1.5, 5.5, 3.5], [1, 2, 4]), base)
    assert found.ratio == pytest.approx(math.exp(0.5))
    assert found.ratio_error == pytest.approx(0)
    assert found.same_guesses == pytest.approx(2 / 3)


def test_scores_of_windows_are_joined_in_order() -> None:
    joined = join([scores([1.0], [1]), scores([2.0, 3.0], [2, 3])])
    assert joined.surprises.tolist() == [1, 2, 3]
    assert joined.guesses.tolist() == [1, 2, 3]


def test_the_work_of_a_decode_step_is_all_weights_once_and_all_keys_and_values() -> None:
    work = work_of_phases(CONFIG, "bfloat16", "none", decode_shape([512] * 8))
    assert sum(work[name].num_bytes for name in ("qkv", "out", "gate_up", "down", "head")) == 2 * 134_479_872
    assert work["attention"].num_bytes == 8 * 512 * 23_040
    assert work["head"].num_flops == 2 * 8 * 576 * 49152


def test_quantised_weights_are_less_to_read_and_the_head_has_eight_bits() -> None:
    shape = decode_shape([512])
    plain, int8, int4 = (work_of_phases(CONFIG, "bfloat16", name, shape) for name in ("none", "int8", "int4"))
    assert int4["down"].num_bytes / plain["down"].num_bytes == pytest.approx(0.625 / 2)
    assert int4["head"] == int8["head"]
    assert int4["attention"] == plain["attention"]


def test_a_prompt_pairs_each_token_with_those_before_it() -> None:
    shape = prompt_shape(4)
    assert (shape.num_pairs, shape.num_keys, shape.num_sampled) == (10, 4, 1)


def test_a_worker_in_process_runs_all_its_sequences_in_the_first_step() -> None:
    layout = fake_layout(block_size=4)
    num_blocks = num_cache_blocks(batch=3, num_tokens=20, block_size=4)
    worker = start_worker(layout, num_blocks, vocab_size=100, batch=3, context=9, num_steps=5)
    plan, effects = worker.plan(0.0)
    assert effects == []
    assert plan is not None
    assert [(len(s.token_ids), s.start) for s in plan.sequences] == [(1, 8)] * 3
    block_ids = [block_id for sequence in plan.sequences for block_id in sequence.block_table]
    assert len(set(block_ids)) == len(block_ids)
