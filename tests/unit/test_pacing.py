"""Decode steps are spread out only while somebody else has work for the cores."""

from common.engine.pacing import next_start_s


def test_alone_the_next_step_begins_at_once() -> None:
    assert next_start_s(10.0, 0.03, others_want_cores=False) == 10.0


def test_while_others_have_work_steps_begin_a_target_apart() -> None:
    assert next_start_s(10.0, 0.03, others_want_cores=True) == 10.03


def test_without_a_target_nothing_is_paced() -> None:
    assert next_start_s(10.0, 0.0, others_want_cores=True) == 10.0
