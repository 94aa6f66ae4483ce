"""What a gateway adds, from its clients' times and its workers'."""

from bench.fake_workers import draw_text
from bench.gateway_figures import Served, Window, summarize_streams
from bench.measure import RequestFigures, measure
from tests.unit.bench_rig import DONE, exchange, text, usage

WINDOW = Window(begin_s=10.0, end_s=20.0, gateway_cpu_s=0.003, bench_cpu_s=1.0)


def seen(*times: float, num_tokens: int) -> RequestFigures:
    """Sent at 10.5, with an event at each time."""
    chunks = [(time, text("x")) for time in times]
    return measure(exchange([*chunks, (times[-1], usage(4, num_tokens) + DONE)], num_output=num_tokens), started_s=0.0)


def test_what_the_worker_took_is_not_added_by_the_gateway() -> None:
    served = Served(asked_s=10.501, sent_s=[10.601, 10.700, 10.800])
    figures = summarize_streams(1, 1, [(seen(10.604, 10.702, 10.810, num_tokens=3), served)], WINDOW)
    assert figures.added_ttft is not None
    assert figures.token_delay is not None
    assert figures.added_gap is not None
    assert round(figures.added_ttft.max, 6) == 0.004
    assert round(figures.token_delay.max, 6) == 0.010
    assert round(figures.added_gap.max, 6) == 0.008
    assert (figures.tokens_per_s, round(figures.cpu_per_token_s, 6)) == (0.3, 0.001)


def test_what_is_outside_of_the_window_is_not_counted() -> None:
    before = Served(asked_s=8.0, sent_s=[8.1, 9.9, 10.1])
    figures = summarize_streams(1, 1, [(seen(8.2, 9.95, 10.2, num_tokens=3), before)], WINDOW)
    assert figures.tokens_per_s == 0.1
    assert figures.token_delay is not None
    assert figures.token_delay.num == 1


def test_a_stream_in_which_two_tokens_were_one_event_has_no_latencies() -> None:
    served = Served(asked_s=10.5, sent_s=[10.6, 10.7, 10.8])
    figures = summarize_streams(1, 1, [(seen(10.61, 10.81, num_tokens=3), served)], WINDOW)
    assert figures.token_delay is None
    assert figures.added_ttft is None
    assert figures.tokens_per_s == 0.3


def test_drawn_tokens_are_frequent_ones_more_often_than_rare_ones() -> None:
    drawn = draw_text(32_000, seed=0)
    assert min(drawn) >= 300
    assert max(drawn) < 32_000
    assert sum(token_id < 3_000 for token_id in drawn) > 0.4 * len(drawn)
