"""`baton bench gateway`: a real gateway process between clients and workers without a model."""

import json
from pathlib import Path

import baton

FAST = ("--token-rate=500", "--prefill-ms=1", "--stream-input-len=20", "--stream-output-len=8", "--seconds=0.3")


def test_every_number_of_streams_has_its_cost_and_what_was_added(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    assert baton.main(["bench", "gateway", "--streams=1,4", *FAST, f"--json={results}"]) == 0
    report = json.loads(results.read_text())
    assert [row["num_streams"] for row in report["streams"]] == [1, 4]
    for row in report["streams"]:
        assert row["failures"] == {}
        assert row["cpu_per_token_s"] > 0
        assert row["added_ttft"]["num"] > 0
        assert row["token_delay"]["p50"] > 0
    one, four = report["streams"]
    assert four["tokens_per_s"] > 2 * one["tokens_per_s"]


def test_streams_are_spread_over_several_gateways(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    assert baton.main(["bench", "gateway", "--streams=4", "--gateways=1,2", *FAST, f"--json={results}"]) == 0
    one, two = json.loads(results.read_text())["streams"]
    assert (one["num_gateways"], two["num_gateways"]) == (1, 2)
    assert two["failures"] == {}
    assert two["num_requests"] == one["num_requests"]
    assert two["tokens_per_s"] > one["tokens_per_s"] / 2


def test_results_are_drawn(tmp_path: Path) -> None:
    assert baton.main(["bench", "gateway", "--streams=1", *FAST, f"--plots={tmp_path}"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gateway.png", "gateway.svg"]
