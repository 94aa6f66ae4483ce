"""Pools that are planned, and runs that are compared, with costs that are easy to reckon with."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import baton
from bench.exchange import Server
from bench.figures import summarize
from bench.machine_load import MachineLoad
from bench.planning.cluster import Cluster
from bench.planning.deployment import Pools
from bench.planning.planner import Planner, PoolsGoodput, at_rate, extend, parse_pools, splits
from bench.planning.results import best
from bench.results import Report, Run
from bench.slo import Objectives
from bench.workload import Load, RequestSpec, draw_tokens
from common.bench_config import BenchSearchOptions, BenchTokenOptions
from tests.unit.planning_rig import plan_of, step_costs, worker_model, write_handoffs, write_steps

TOKENS = BenchTokenOptions(vocab_size=1000)


def test_a_trace_that_is_used_again_has_other_tokens() -> None:
    """The same ones in the same places, as in the trace."""
    trace = [RequestSpec(0, 8, 1, block=4, hash_ids=(0, 1)), RequestSpec(1, 8, 1, block=4, hash_ids=(0, 2))]
    prompts = [tuple(draw_tokens(spec, seed=0, vocab_size=1000, salt=0)) for spec in extend(trace, 5)]
    assert len(set(prompts)) == 5
    assert len({prompt[:4] for prompt in prompts}) == 3
    assert prompts[2][:4] == prompts[3][:4] != prompts[0][:4] == prompts[1][:4]


def test_a_plan_at_another_rate_has_its_times_scaled() -> None:
    plan = plan_of([RequestSpec(index, 4, 1) for index in range(4)], Load("rate", 1.0))
    assert [request.send_at_s for request in at_rate(plan, 2.0).requests] == [
        (request.send_at_s or 0) / 2 for request in plan.requests
    ]
    assert at_rate(plan, 2.0).requests[-1].send_at_s == pytest.approx(2.0)


def test_splits_are_all_ways_to_divide_workers() -> None:
    assert splits(4) == [Pools(1, 3), Pools(2, 2), Pools(3, 1)]
    assert parse_pools("2:14") == Pools(2, 14)


def planner(num_input: int, num_output: int, decode: Sequence[float] = (0.01, 0, 0, 0)) -> Planner:
    """A prompt's token takes a millisecond."""
    specs = [RequestSpec(index, num_input, num_output) for index in range(20)]
    return Planner(worker_model(steps=step_costs(decode=decode)), specs, per_worker=30, tokens=TOKENS)


def goodput(found: Planner, pools: Pools, objectives: Objectives, start_rate: float) -> PoolsGoodput:
    return found.search(pools, objectives, BenchSearchOptions(tolerance=0.1), start_rate)


def test_the_search_ends_between_a_hit_and_a_miss_and_keeps_the_figures_of_the_hit() -> None:
    """A prompt takes 100 ms, so ten a second is the most; objectives leave room for two before it."""
    found = goodput(planner(100, 2), Pools(1, 1), Objectives(ttft_s=0.3), 4.0)
    assert found.figures is not None
    assert found.figures.attainment is not None
    assert found.figures.attainment >= 0.9
    assert found.miss is not None
    assert 3 < found.hit < found.miss < 10
    assert found.prefill_busy == pytest.approx(found.hit * 0.1, rel=0.2)
    assert 0 < found.decode_busy < found.prefill_busy


def test_goodput_grows_with_the_pools_at_least_as_they_do() -> None:
    """Several workers even out what comes at random."""
    found, objectives = planner(100, 1), Objectives(ttft_s=0.3)
    one, three = (goodput(found, Pools(num, num), objectives, 4.0 * num) for num in (1, 3))
    assert three.per_worker >= one.per_worker


@pytest.mark.parametrize(
    ("num_input", "num_output", "wanted"),
    [(200, 2, Pools(2, 1)), (10, 40, Pools(1, 2))],
    ids=["long prompts", "long answers"],
)
def test_the_best_split_has_more_workers_where_the_work_is(num_input: int, num_output: int, wanted: Pools) -> None:
    found = planner(num_input, num_output, decode=(0.01, 0.004, 0, 0))
    results = [goodput(found, pools, Objectives(ttft_s=1.0, tpot_s=0.05), 4.0) for pools in splits(3)]
    assert best(results).pools == wanted


def plan(tmp_path: Path, *flags: str) -> dict[str, Any]:
    """What the command writes."""
    files = write_steps(tmp_path / "steps.json"), write_handoffs(tmp_path / "handoffs.json")
    path = tmp_path / "plan.json"
    costs = f"--steps={files[0]}", f"--handoffs={files[1]}", f"--json={path}"
    assert baton.main(["bench", "plan", *costs, *flags]) == 0
    return json.loads(path.read_text())


def write_trace(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_the_command_plans_for_each_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"t": 0.1 * index, "in": 40, "out": 4, "block": 16, "hash_ids": [index % 4]} for index in range(10)]
    traces = [write_trace(tmp_path / name, rows) for name in ("one.jsonl", "two.jsonl")]
    results = plan(
        *(tmp_path, f"--traces={traces[0]},{traces[1]}", "--requests-per-worker=10", "--max-probes=4"),
        *("--pools=1:1,2:2", "--split=3", "--ttft-slo=5x", "--tpot-slo=100ms"),
    )
    assert [found["requests"] for found in results["plans"]] == ["one.jsonl", "two.jsonl"]
    assert [each["pools"] for each in results["plans"][0]["pools"]] == [
        {"num_prefill": num, "num_decode": num} for num in (1, 2)
    ]
    assert [len(each["probes"]) for each in results["plans"][1]["splits"]["3"]] == [4, 4]
    shown = capsys.readouterr().out
    assert "Goodput, one.jsonl" in shown
    assert "two.jsonl: the best of 3 workers is" in shown


def test_equal_seeds_give_equal_plans(tmp_path: Path) -> None:
    flags = ("--pools=2:2", "--input-len=20-60", "--requests-per-worker=10", "--max-probes=5", "--tpot-slo=30ms")
    assert plan(tmp_path, *flags) == plan(tmp_path, *flags)


def test_a_measured_run_is_simulated_as_it_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that is another simulation, with steps twice as long, deviates by half."""
    trace = write_trace(tmp_path / "t.jsonl", [{"t": 0.5 * index, "in": 40, "out": 5} for index in range(8)])
    command = {"servers": {"warmup": 1}, "requests": {"trace": str(trace), "num_requests": 6}, "randomness": {}}
    slow = worker_model(steps=step_costs(prompt=(0.04, 0.002, 2e-6), decode=(0.02, 0.002, 0.004, 2e-6)))
    requests = Cluster(Pools(1, 1), slow, 0).run(plan_of([RequestSpec(i, 40, 5) for i in range(6)], Load("rate", 1.0)))
    run = Run(
        server="a",
        load=Load("rate", 1.0),
        repeat=0,
        machine=MachineLoad(0.0, None),
        cpu_s=0.0,
        wall_s=1.0,
        figures=summarize(requests, Objectives()),
        groups={},
        shares_prefixes=False,
        requests=tuple(requests),
    )
    measured = tmp_path / "measured.json"
    measured.write_bytes(msgspec.json.encode(Report("run", command, [Server("a", "http://a", "m")], runs=[run])))
    (compared,) = plan(tmp_path, f"--measured={measured}")["comparisons"]
    assert compared["simulated"]["num_completed"] == 6
    assert compared["simulated"]["tpot"]["p50"] == pytest.approx(compared["measured"]["tpot"]["p50"] / 2, rel=0.1)
    assert "TPOT p50" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--pools=1:1"], "wanted objectives"),
        (["--ttft-slo=1s"], "wanted deployments"),
        (["--ttft-slo=1s", "--pools=1:1", "--traces=none.jsonl"], "cannot read none.jsonl"),
        (["--measured=none.json"], "cannot read none.json"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], wanted: str
) -> None:
    files = write_steps(tmp_path / "steps.json"), write_handoffs(tmp_path / "handoffs.json")
    assert baton.main(["bench", "plan", f"--steps={files[0]}", f"--handoffs={files[1]}", *flags]) == 2
    assert wanted in capsys.readouterr().err
