"""What /metrics says of the gateway itself, and what is written about it."""

import re
from pathlib import Path

from common.link_counters import LinkCounters
from common.metrics import GatewayMetrics
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


def test_every_metric_of_the_gateway_is_on_the_metrics_page_and_no_other() -> None:
    requests = Requests(Fleet("fake-model", lambda name, reason: None), POLICY)
    worker = {"p0": status(P0, Role.PREFILL)}
    metrics = GatewayMetrics("m", lambda: worker, lambda: {**LinkCounters().totals(), **requests.totals})
    named = set(re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.MULTILINE))
    assert named == set(re.findall(r"^# TYPE (\S+)", metrics.render().decode(), re.MULTILINE))
