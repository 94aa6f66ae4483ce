"""Costs that are fitted to measured points, and steps that slow each other down."""

import json
from pathlib import Path

import pytest

from bench.inside.plans import decode_plan, prompt_plan
from bench.planning.clock import Clock
from bench.planning.costs import fit_times, read_handoff_costs, read_step_costs
from bench.planning.host import Host, StepTime
from common.errors import ConfigError
from tests.unit.planning_rig import DECODE, HANDOFF, PROMPT, write_handoffs, write_steps


def test_a_fit_recovers_the_coefficients_that_made_the_times() -> None:
    rows = [(1, n, n * n) for n in (1, 3, 10, 40)]
    fit = fit_times(("a", "b", "c"), rows, [2 + 0.5 * n + 0.01 * n * n for n in (1, 3, 10, 40)])
    assert fit.coefficients == pytest.approx((2, 0.5, 0.01))
    assert max(map(abs, fit.errors)) < 1e-9
    assert fit.seconds((1, 20, 400)) == pytest.approx(16)


def test_no_coefficient_is_below_zero() -> None:
    fit = fit_times(("a", "b"), [(1, n) for n in (1, 2, 4, 8)], [10.0, 9.0, 8.0, 7.0])
    assert fit.coefficients[1] == 0
    assert 7 < fit.coefficients[0] < 10


def test_errors_are_shares_of_what_was_measured() -> None:
    fit = fit_times(("a",), [(1,), (1,)], [1.0, 2.0])
    (time_s,) = fit.coefficients
    assert fit.errors == pytest.approx((time_s - 1, time_s / 2 - 1))


def test_steps_cost_what_the_medians_of_their_file_say(tmp_path: Path) -> None:
    costs = read_step_costs("--steps", [str(write_steps(tmp_path / "steps.json"))])
    assert costs.prompt.coefficients == pytest.approx(PROMPT)
    assert costs.decode.coefficients == pytest.approx(DECODE)


def test_curves_of_several_files_are_one_set(tmp_path: Path) -> None:
    curves = json.loads(write_steps(tmp_path / "all.json").read_text())["curves"]
    paths = [tmp_path / f"{curve['name']}.json" for curve in curves]
    for path, curve in zip(paths, curves, strict=True):
        path.write_text(json.dumps({"curves": [curve]}))
    costs = read_step_costs("--steps", list(map(str, paths)))
    assert (costs.prompt.coefficients, costs.decode.coefficients) == (pytest.approx(PROMPT), pytest.approx(DECODE))


def test_a_chunk_costs_its_tokens_and_what_they_look_at(tmp_path: Path) -> None:
    costs = read_step_costs("--steps", [str(write_steps(tmp_path / "steps.json"))])
    assert costs.prompt_s(prompt_plan([1] * 10, 100, 16)) == pytest.approx(0.02 + 0.010 + 1e-6 * (10 * 100 + 55))
    assert costs.decode_s(decode_plan(6, 50, 16)) == pytest.approx(0.01 + 0.006 + 2 * 0.002 + 1e-6 * 6 * 50)


def test_handoffs_cost_what_those_of_their_transport_did(tmp_path: Path) -> None:
    path = str(write_handoffs(tmp_path / "handoffs.json"))
    assert read_handoff_costs(path, "tcp").coefficients == pytest.approx(HANDOFF)
    assert read_handoff_costs(path, "shm").coefficients == pytest.approx([each / 2 for each in HANDOFF])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, "cannot read"),
        ("{}", "has no such results"),
        ('{"curves": []}', "wanted all curves"),
    ],
)
def test_a_file_without_steps_is_refused(tmp_path: Path, text: str | None, wanted: str) -> None:
    path = tmp_path / "steps.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"--steps.*{wanted}"):
        read_step_costs("--steps", [str(path)])


class Ends:
    """When each step ended."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.host = Host(self.clock)
        self.at_s: dict[str, float] = {}

    def run(self, name: str, alone_s: float, shared_s: float) -> None:
        self.host.run(StepTime(alone_s, shared_s), lambda: self.at_s.update({name: self.clock.now}))


def test_a_step_that_has_its_host_for_itself_takes_its_time_alone() -> None:
    ends = Ends()
    ends.clock.at(2.0, lambda: ends.run("a", 1.0, 5.0))
    ends.clock.run_for(10.0)
    assert ends.at_s == {"a": 3.0}
    assert not ends.host.is_computing


def test_steps_slow_each_other_down_for_as_long_as_both_run() -> None:
    """a has done half of its work when b begins; the rest takes it twice as long. Then b has its host for itself."""
    ends = Ends()
    ends.clock.at(0.0, lambda: ends.run("a", 1.0, 2.0))
    ends.clock.at(0.5, lambda: ends.run("b", 3.0, 4.0))
    ends.clock.run_for(10.0)
    assert ends.at_s["a"] == pytest.approx(1.5)
    assert ends.at_s["b"] == pytest.approx(1.5 + 0.75 * 3)


def test_a_step_that_follows_at_once_slows_the_other_one_down_again() -> None:
    ends = Ends()
    ends.clock.at(0.0, lambda: ends.run("a", 1.0, 2.0))
    for start_s in (0.0, 0.5, 1.0, 1.5):
        ends.clock.at(start_s, lambda: ends.run("b", 0.1, 0.5))
    ends.clock.run_for(10.0)
    assert ends.at_s["a"] == pytest.approx(2.0)
