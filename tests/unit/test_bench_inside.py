"""The pure parts of the commands that look at the engine from inside."""

import pytest

from bench.inside.curves import Curve, Point
from bench.inside.plans import decode_plan, num_blocks_for, prompt_plan, prompt_tokens


def curve(*points: tuple[int, float]) -> Curve:
    return Curve("batch", "Steps", "sequences", [Point(size, size, [time_s]) for size, time_s in points])


def test_exponents_say_how_a_time_grows_between_two_points() -> None:
    assert curve((1, 3.0), (2, 3.0), (4, 6.0), (12, 54.0)).exponents() == pytest.approx([0, 1, 2])
    assert curve((4, 1.0)).exponents() == []


def test_a_point_whose_median_is_far_above_its_fastest_is_unsteady() -> None:
    assert Point(1, 1, [1.0, 2.3, 2.4]).is_unsteady
    assert not Point(1, 1, [1.0, 1.1, 9.0]).is_unsteady


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
