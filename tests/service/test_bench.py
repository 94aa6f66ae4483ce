"""`baton bench` against a server that does what the test says."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import baton
from bench import machine_load
from tests.service import bench_server
from tests.service.bench_server import PROMPT_S, BenchServer


@pytest.fixture
def server() -> Iterator[BenchServer]:
    server = BenchServer()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def no_look_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take half a second for each run."""
    monkeypatch.setattr(machine_load, "_LOOK_S", 0.0)


class Bench:
    """Runs commands against the server; `results` has what the last one wrote."""

    def __init__(self, server: BenchServer, folder: Path) -> None:
        self._server = server
        self._json = folder / "results.json"
        self.results: dict[str, Any] = {}

    def __call__(self, command: str, *flags: str) -> int:
        """The exit code. Without --url among the flags the one server is measured."""
        url = [] if any(flag.startswith("--url") for flag in flags) else [f"--url=a={self._server.url}"]
        code = baton.main(["bench", command, *url, f"--json={self._json}", *flags])
        self.results = json.loads(self._json.read_text())
        return code

    @property
    def requests(self) -> list[dict[str, Any]]:
        return self.results["runs"][0]["requests"]

    @property
    def figures(self) -> dict[str, Any]:
        return self.results["runs"][0]["figures"]


@pytest.fixture
def bench(server: BenchServer, tmp_path: Path) -> Bench:
    return Bench(server, tmp_path)


SMALL = ("--num-requests=4", "--input-len=5-9", "--output-len=3", "--warmup=0")


def test_a_closed_loop_sends_what_was_planned_and_counts_what_came(bench: Bench, server: BenchServer) -> None:
    assert bench("run", *SMALL, "--concurrency=2") == 0
    assert server.paths == ["/v1/completions"] * 4
    assert all(5 <= len(body["prompt"]) <= 9 and body["model"] == "tiny" for body in server.asked)
    asked = server.asked[0]
    assert (asked["max_tokens"], asked["ignore_eos"], asked["temperature"], asked["stream"]) == (3, True, 0, True)
    assert asked["stream_options"] == {"include_usage": True}
    assert [request["num_output"] for request in bench.requests] == [3] * 4
    assert [request["tokens_per_event"] for request in bench.requests] == [[1, 1, 1]] * 4
    assert sorted(request["num_input"] for request in bench.requests) == sorted(len(b["prompt"]) for b in server.asked)
    assert all(request["ttft_s"] >= PROMPT_S for request in bench.requests)
    assert (bench.figures["num_completed"], bench.figures["failures"]) == (4, {})


def test_a_seed_asks_the_same_again_and_another_does_not(bench: Bench, server: BenchServer) -> None:
    for seed in (1, 1, 2):
        bench("run", *SMALL, "--concurrency=1", f"--seed={seed}")
    first, again, other = (server.asked[i : i + 4] for i in (0, 4, 8))
    assert first == again
    assert first != other


def test_poisson_arrivals_have_their_times_in_the_results(bench: Bench) -> None:
    assert bench("run", *SMALL, "--rate=100") == 0
    assert all(request["sent_s"] >= request["scheduled_s"] for request in bench.requests)
    assert bench.requests[-1]["scheduled_s"] == pytest.approx(4 / 100)


def test_every_kind_of_failure_is_counted_and_named(
    bench: Bench, server: BenchServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = [
        bench_server.refuse,
        bench_server.fail_within,
        bench_server.cut_off,
        bench_server.end_early,
        bench_server.hang,
    ]
    assert bench("run", *SMALL, "--num-requests=7", "--concurrency=1", "--timeout=0.3") == 1
    assert bench.figures["failures"] == {
        "HTTP 503": 1,
        "error in the stream": 1,
        "connection lost": 1,
        "stream without its end": 1,
        "timeout": 1,
    }
    assert bench.figures["num_completed"] == 2
    shown = capsys.readouterr().out
    assert "1 × HTTP 503: no worker" in shown
    assert "1 × error in the stream: worker died" in shown


def test_a_server_that_is_not_there_is_named(server: BenchServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.close()
    assert baton.main(["bench", "run", f"--url={server.url}"]) == 1
    assert f"cannot reach {server.url}" in capsys.readouterr().err


def test_a_server_that_cannot_serve_the_first_request_is_told_before_the_run(
    server: BenchServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = [bench_server.refuse]
    assert baton.main(["bench", "run", f"--url=a={server.url}", "--warmup=1"]) == 1
    assert "does not serve the requests: HTTP 503: no worker" in capsys.readouterr().err


def test_ctrl_c_keeps_what_there_is(bench: Bench, server: BenchServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = [bench_server.answer, bench_server.hang]
    server.on_hang = lambda: os.kill(os.getpid(), signal.SIGINT)
    assert bench("run", *SMALL, "--concurrency=1") == 130
    assert (bench.figures["num_completed"], bench.figures["num_stopped"]) == (1, 1)
    assert bench.figures["failures"] == {}
    assert bench.results["is_stopped"]
    assert "Stopped" in capsys.readouterr().out


def test_two_servers_alternate_and_are_compared(bench: Bench, server: BenchServer) -> None:
    other = BenchServer()
    try:
        urls = (f"--url=a={server.url}", f"--url=b={other.url}/v1/")
        assert bench("run", *SMALL, *urls, "--concurrency=2", "--repeats=2") == 0
    finally:
        other.close()
    assert [(run["server"], run["repeat"]) for run in bench.results["runs"]] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    by_prompt = [sorted(map(str, asked.asked)) for asked in (server, other)]
    assert by_prompt[0] == by_prompt[1]
    assert {(ratio["server"], ratio["base"], len(ratio["ratios"])) for ratio in bench.results["comparisons"]} == {
        ("b", "a", 2)
    }


def test_two_names_of_one_server_have_different_tokens(bench: Bench, server: BenchServer) -> None:
    assert bench("run", *SMALL, f"--url=a={server.url}", f"--url=b={server.url}", "--concurrency=1") == 0
    assert len({str(body["prompt"]) for body in server.asked}) == 8


def test_a_trace_is_replayed_with_its_lengths_cut(bench: Bench, server: BenchServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"t": 5 + i, "in": 8, "out": 9, "block": 4, "hash_ids": [0, i], "session": "s"} for i in range(2)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert bench("run", f"--trace={trace}", "--time-factor=0.01", "--max-output-len=2", "--warmup=0") == 0
    first, second = (body["prompt"] for body in server.asked)
    assert first[:4] == second[:4]
    assert first[4:] != second[4:]
    assert [(r["scheduled_s"], r["num_output"], r["session"]) for r in bench.requests] == [(0, 2, "s"), (0.01, 2, "s")]


def test_texts_are_sent_as_chats(bench: Bench, server: BenchServer, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("First\nparagraph.\n\nSecond.\n")
    assert bench("run", *SMALL, f"--prompts={prompts}", "--concurrency=1") == 0
    assert server.paths == ["/v1/chat/completions"] * 4
    contents = [body["messages"][0]["content"] for body in server.asked]
    assert contents == ["First\nparagraph.", "Second."] * 2
    assert [request["num_input"] for request in bench.requests] == [7] * 4


def test_goodput_measures_unloaded_first_and_stops_at_its_probes(bench: Bench, tmp_path: Path) -> None:
    flags = ("--ttft-slo=1000x", "--tpot-slo=10s", "--num-unloaded=2", "--start-rate=50", "--max-probes=3")
    assert bench("goodput", *SMALL, *flags, f"--plots={tmp_path / 'plots'}") == 0
    (search,) = bench.results["searches"]
    assert [probe["rate"] for probe in search["probes"]] == [50, 100, 200]
    assert (search["hit"], search["miss"]) == (200, None)
    assert bench.results["objectives"]["ttft_s"] == pytest.approx(1000 * bench.results["unloaded"]["ttft_s"])
    assert (tmp_path / "plots" / "attainment.svg").exists()


def test_a_search_on_a_server_that_answers_nothing_ends(bench: Bench, server: BenchServer) -> None:
    server.script = [bench_server.refuse] * 4
    assert bench("goodput", *SMALL, "--ttft-slo=1s", "--start-rate=100") == 1
    (search,) = bench.results["searches"]
    assert (len(search["probes"]), search["hit"]) == (1, 0)


def test_mixed_load_reports_streams_and_long_prompts_apart(bench: Bench, server: BenchServer) -> None:
    lengths = ("--stream-input-len=5", "--stream-output-len=6", "--long-input-len=50", "--long-output-len=2")
    numbers = ("--num-streams=2", "--num-long=3", "--long-start=0.01", "--long-interval=0.01", "--warmup=0")
    assert bench("mixed", *lengths, *numbers) == 0
    assert sorted(len(body["prompt"]) for body in server.asked) == [5, 5, 50, 50, 50]
    groups = bench.results["runs"][0]["groups"]
    assert {name: group["num_completed"] for name, group in groups.items()} == {"streams": 2, "long prompts": 3}


def test_phases_that_a_server_tells_are_kept(bench: Bench) -> None:
    bench("run", *SMALL, "--concurrency=1")
    assert bench.requests[0]["phases_s"] == {"queue_s": 0.5, "decode_s": 1.5}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "--concurrency=1", "--rate=1"], "--concurrency and --rate"),
        (["run", "--url=a=http://x", "--url=a=http://y"], "a name of its own"),
        (["run", "--rate=0"], "--rate: got '0'"),
        (["run", "--trace=/nowhere.jsonl"], "--trace: cannot read /nowhere.jsonl"),
        (["run", "--json=/nowhere/x.json"], "--json: got /nowhere/x.json"),
        (["goodput"], "--ttft-slo, --tpot-slo or both"),
        (["fly"], "command: got 'bench fly'"),
    ],
)
def test_unusable_flags_are_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert baton.main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err


def test_plots_without_matplotlib_name_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert baton.main(["bench", "run", f"--plots={tmp_path}"]) == 2
    assert "the extra `bench`" in capsys.readouterr().err
