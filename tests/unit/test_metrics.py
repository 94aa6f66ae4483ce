"""What /metrics says of the gateway itself, and what is written about it."""

import re
from pathlib import Path
from random import Random

from common.link_counters import LinkCounters
from common.metrics import GatewayMetrics, SequenceTimer
from common.wire import Role
from gateway.fleet import Fleet
from gateway.requests import Requests
from tests.unit.requests_rig import P0, POLICY, status

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_what_the_gateway_counts_is_scraped_as_counters() -> None:
    totals = {"retries": 1, "links_refused_surplus": 0}
    metrics = GatewayMetrics("m", dict, lambda: totals)
    totals["retries"] = 7
    text = metrics.render().decode()
    assert "# TYPE baton_gateway_retries_total counter" in text
    assert 'baton_gateway_retries_total{model_name="m"} 7.0' in text
    assert 'baton_gateway_links_refused_surplus_total{model_name="m"} 0.0' in text


def test_a_histogram_counts_every_sample_in_its_bucket_and_those_above() -> None:
    metrics = GatewayMetrics("m", dict, dict)
    for seconds in (0.0005, 0.001, 0.0011, 11):
        metrics.itl.observe(seconds)
    text = metrics.render().decode()
    name = "vllm:inter_token_latency_seconds"
    assert f"# TYPE {name} histogram" in text
    for bound, count in (("0.001", 2), ("0.0025", 3), ("10.0", 3), ("+Inf", 4)):
        assert f'{name}_bucket{{le="{bound}",model_name="m"}} {count}.0' in text
    assert f'{name}_count{{model_name="m"}} 4.0' in text
    assert f'{name}_sum{{model_name="m"}} 11.0026' in text


def test_a_sequence_s_tokens_are_counted_and_their_gaps_observed() -> None:
    metrics = GatewayMetrics("m", dict, dict)
    timer = SequenceTimer(metrics, arrival_s=0.0)
    for num_tokens in (1, 0, 3):
        timer.add_tokens(num_tokens)
    text = metrics.render().decode()
    assert 'vllm:generation_tokens_total{model_name="m"} 4.0' in text
    assert 'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0' in text
    assert 'vllm:inter_token_latency_seconds_count{model_name="m"} 1.0' in text


def test_every_metric_of_the_gateway_is_on_the_metrics_page_and_no_other() -> None:
    requests = Requests(Fleet("fake-model", lambda name, reason: None), POLICY, Random(0))
    worker = {"p0": status(P0, Role.PREFILL)}
    metrics = GatewayMetrics("m", lambda: worker, lambda: {**LinkCounters().totals(), **requests.totals})
    named = set(re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.MULTILINE))
    assert named == set(re.findall(r"^# TYPE (\S+)", metrics.render().decode(), re.MULTILINE))
