"""The search for a rate, the order of servers, and what makes figures doubtful."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.exchange import Exchange, Server
from bench.figures import summarize
from bench.goodput import RateSearch
from bench.interleave import compare, in_turn
from bench.machine_load import MachineLoad, busy_share, read_cpu_times
from bench.measure import measure
from bench.plots import write_plots
from bench.results import Report, Run, SearchResult, compare_runs, compare_searches, warnings_of
from bench.slo import Objectives
from bench.workload import Load, PlannedRequest, RequestSpec


def search(attainment_at: Callable[[float], float], *, start: float = 1.0, max_probes: int = 30) -> RateSearch:
    """A whole search on a server that is described by what it attains at a rate."""
    found = RateSearch(start, wanted=0.9, tolerance=0.05, max_probes=max_probes)
    while (rate := found.next_rate()) is not None:
        found.record(rate, attainment_at(rate))
    return found


def server_of_capacity(capacity: float) -> Callable[[float], float]:
    """Everything is in time up to the capacity; beyond it the queue grows and only the first requests are."""
    return lambda rate: min(1.0, capacity / rate)


@pytest.mark.parametrize("capacity", [0.07, 0.9, 1.0, 3.7, 500.0])
@pytest.mark.parametrize("start", [0.1, 1.0, 40.0])
def test_the_search_brackets_the_highest_rate_within_its_tolerance(capacity: float, start: float) -> None:
    found = search(server_of_capacity(capacity), start=start)
    answer = capacity / 0.9
    assert found.miss is not None
    assert found.hit <= answer * 1.000001
    assert found.miss >= answer
    assert found.miss / found.hit <= 1.05


def test_a_search_without_a_miss_ends_with_its_probes() -> None:
    found = search(lambda rate: 1.0, max_probes=4)
    assert [probe.rate for probe in found.probes] == [1, 2, 4, 8]
    assert (found.hit, found.miss) == (8, None)


def test_a_search_without_a_hit_ends_with_its_probes() -> None:
    found = search(lambda rate: 0.5, max_probes=3)
    assert [probe.rate for probe in found.probes] == [1, 0.5, 0.25]
    assert (found.hit, found.miss) == (0.0, 0.25)


def test_a_hit_above_a_miss_is_not_believed() -> None:
    found = RateSearch(1.0, wanted=0.9, tolerance=0.05, max_probes=9)
    for rate, attainment in ((1.0, 1.0), (2.0, 0.8), (3.0, 1.0)):
        found.record(rate, attainment)
    assert (found.hit, found.miss) == (1.0, 2.0)


def test_a_search_that_is_given_up_probes_no_more() -> None:
    found = RateSearch(1.0, wanted=0.9, tolerance=0.05, max_probes=9)
    found.give_up()
    assert found.next_rate() is None


def test_servers_go_forth_and_back() -> None:
    assert [server for repeat in range(4) for server in in_turn("AB", repeat)] == list("ABBAABBA")


def test_a_comparison_is_of_ratios_of_pairs() -> None:
    found = compare("goodput", "search", "b", "a", [(2.0, 1.0), (3.0, 2.0), (9.0, 3.0), (1.0, 0.0)])
    assert found is not None
    assert found.ratios == (2.0, 1.5, 3.0)
    assert (found.median, found.min, found.max) == (2.0, 1.5, 3.0)
    assert compare("goodput", "search", "b", "a", [(1.0, 0.0)]) is None


def test_cpu_times_come_from_the_first_line_and_guests_are_not_counted_twice() -> None:
    before = read_cpu_times("cpu  10 0 10 70 10 0 0 0 5 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n")
    assert before == (80, 100)
    assert busy_share(before, (120, 200)) == pytest.approx(0.6)
    assert busy_share(before, before) == 0.0


def run(
    server: str = "a", repeat: int = 0, *, gap_s: float = 0.1, num_events: int = 3, load: Load | None = None
) -> Run:
    """Two requests whose events are gap_s apart, asked for three tokens each."""
    pieces = [(1.0 + i * gap_s, b'data: {"choices":[{"text":"x"}]}\n\n') for i in range(num_events)]
    last = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    exchanges = [
        Exchange(
            PlannedRequest(RequestSpec(i, 4, 3, group="streams"), [1] * 4, 0.5), 0.5, 2.0, 200, [*pieces, (2.0, last)]
        )
        for i in range(2)
    ]
    requests = tuple(measure(exchange, 0.0) for exchange in exchanges)
    figures = summarize(requests, Objectives())
    machine = MachineLoad(0.1, 0.05)
    return Run(
        server, load or Load("rate", 1), repeat, machine, 0.1, 2.0, figures, {"streams": figures}, False, requests
    )


SERVERS = [Server("a", "http://a", "m"), Server("b", "http://b", "m")]


def test_runs_are_compared_repeat_by_repeat_whole_and_in_groups() -> None:
    runs = [run("a", 0, gap_s=0.1), run("b", 0, gap_s=0.2), run("b", 1, gap_s=0.3), run("a", 1, gap_s=0.1), run("a", 2)]
    found = {(c.load, c.metric): c.ratios for c in compare_runs(runs, SERVERS)}
    assert found["1 req/s", "TPOT p50"] == pytest.approx((2.0, 3.0))
    assert found["1 req/s: streams", "longest gap"] == pytest.approx((2.0, 3.0))
    assert found["1 req/s", "TTFT p50"] == pytest.approx((1.0, 1.0))


def test_searches_are_compared_by_what_they_hit() -> None:
    searches = [
        SearchResult(name, r, 0.9, (), hit, None) for name, r, hit in (("a", 0, 2.0), ("b", 0, 3.0), ("b", 1, 1.0))
    ]
    (found,) = compare_searches(searches, SERVERS)
    assert (found.metric, found.ratios) == ("goodput", (1.5,))


def test_a_clean_run_has_no_warning() -> None:
    assert warnings_of(run()) == []


@pytest.mark.parametrize(
    ("doubtful", "warning"),
    [
        (lambda: replace(run(), cpu_s=1.5), "the client itself was the bottleneck: it used 75% of a core"),
        (lambda: replace(run(), machine=MachineLoad(2.0, 0.5)), "the machine was 50% busy before the run"),
        (lambda: run(num_events=2), "an event had 1.50 tokens on average"),
        (lambda: replace(run(), figures=replace(run().figures, max_send_lag_s=0.2)), "sent a request 200 ms late"),
        (lambda: replace(run(), figures=replace(run().figures, cached_share=0.5)), "knew 50% of the prompts already"),
        (lambda: replace(run(), figures=replace(run().figures, num_without_usage=2)), "2 streams had no usage"),
        (lambda: replace(run(), figures=replace(run().figures, mismatches=("x",))), "usage of 1 of 2 requests"),
    ],
)
def test_what_makes_figures_doubtful_is_warned_of(doubtful: Callable[[], Run], warning: str) -> None:
    (found,) = warnings_of(doubtful())
    assert warning in found


def test_shared_prefixes_are_no_reason_for_a_warning() -> None:
    assert warnings_of(replace(run(), figures=replace(run().figures, cached_share=0.5), shares_prefixes=True)) == []


def test_every_plot_that_there_is_data_for_is_drawn_twice(tmp_path: Path) -> None:
    told = run()
    told = replace(
        told, requests=(replace(told.requests[0], phases_s={"queue_s": 0.1, "decode_s": 0.4}), told.requests[1])
    )
    report = Report("run", {}, SERVERS, runs=[told, run(load=Load("rate", 2), gap_s=0.0), run("b")])
    names = {path.name for path in write_plots(report, str(tmp_path))}
    stems = {"ttft", "itl", "throughput_latency", "requests_a_1_req_s", "requests_a_2_req_s", "requests_b_1_req_s"}
    assert names == {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "svg")}
    assert all((tmp_path / name).stat().st_size > 1000 for name in names)


def test_nothing_measured_is_nothing_drawn(tmp_path: Path) -> None:
    assert write_plots(Report("run", {}, SERVERS), str(tmp_path)) == []
