"""Decode steps are spread out only while somebody else has work for the cores."""

import pytest

from common.engine.pacing import AIM, RELIEF, Pacer


def starts(pacer: Pacer, durations_s: list[float], *, others_want_cores: bool = True) -> list[float]:
    """How long after a step's start the next one may begin, for steps of so many seconds one after the other."""
    now, waits_s = 100.0, list[float]()
    for duration_s in durations_s:
        next_s = pacer.next_start_s(now, now + duration_s, others_want_cores=others_want_cores)
        waits_s.append(next_s - now)
        now = max(next_s, now + duration_s)
    return waits_s


def test_alone_the_next_step_begins_at_once() -> None:
    assert starts(Pacer(0.03 / AIM), [0.01, 0.2], others_want_cores=False) == [0, 0]


def test_without_a_target_nothing_is_paced() -> None:
    assert starts(Pacer(0.0), [0.01, 0.2]) == [0, 0]


def test_steps_that_hold_the_target_begin_a_little_closer_together_than_it() -> None:
    assert starts(Pacer(0.036), [0.01, 0.02, 0.03]) == pytest.approx([0.03, 0.03, 0.03])


def test_steps_that_cannot_hold_it_leave_the_cores_to_prompts_the_longer_the_later_they_are() -> None:
    waits_s = starts(Pacer(0.03 / AIM), [0.031, 0.031, 0.031, 0.07, 0.07, 0.07])
    assert waits_s[:3] == pytest.approx([0.03 + RELIEF * 0.001] * 3)
    assert waits_s[-1] == pytest.approx(0.03 + RELIEF * 0.04)
    assert waits_s[-1] > 2 * 0.07


def test_one_step_that_was_held_up_does_not_make_streams_wait_for_the_next() -> None:
    assert starts(Pacer(0.03 / AIM), [0.02, 0.02, 3.0, 0.02]) == pytest.approx([0.03] * 4)


def test_steps_count_also_while_nobody_else_has_work() -> None:
    pacer = Pacer(0.03 / AIM)
    starts(pacer, [0.05, 0.05, 0.05], others_want_cores=False)
    assert starts(pacer, [0.05]) == pytest.approx([0.03 + RELIEF * 0.02])
