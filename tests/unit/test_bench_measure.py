"""From raw chunks to times and figures."""

from collections.abc import Sequence

import pytest

from bench.exchange import STOPPED
from bench.figures import distribution, summarize, unloaded_latencies
from bench.measure import RequestFigures, measure
from bench.slo import Objectives, Unloaded, attainment, resolve
from bench.sse import Chunk, split_events
from common.bench_config import BenchObjectiveOptions
from common.errors import ConfigError
from tests.unit.bench_rig import DONE, event, exchange, text, usage


def measured(chunks: Sequence[Chunk], **fields: object) -> RequestFigures:
    return measure(exchange(chunks, **fields), started_s=10.0)  # pyright: ignore[reportArgumentType]


def done(*times: float, num_output: int | None = None) -> RequestFigures:
    """A request with an event at each time."""
    num = len(times) if num_output is None else num_output
    chunks = [(time, text("x")) for time in times]
    return measured([*chunks, (times[-1], usage(4, num) + DONE)], num_output=num)


def failed(failure: str = "timeout") -> RequestFigures:
    return measured([], status=0, failure=failure)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("cut", range(1, 40))
def test_events_come_out_whole_wherever_they_were_cut(end: bytes, cut: int) -> None:
    stream = b"data: one\n\n: comment\n\nevent: x\ndata:two\ndata: more\n\ndata: [DONE]\n\n".replace(b"\n", end)
    found = list(split_events([(1.0, stream[:cut]), (2.0, stream[cut:])]))
    assert [data for _, data in found] == [b"one", b"two\nmore", b"[DONE]"]


def test_several_events_in_a_chunk_have_its_time_and_a_cut_one_that_of_its_end() -> None:
    chunks = [(1.0, b"data: a\n\ndata: b\n\ndata: c"), (2.0, b"\n"), (3.0, b"\n")]
    assert list(split_events(chunks)) == [(1.0, b"a"), (1.0, b"b"), (3.0, b"c")]


def test_an_event_without_its_empty_line_counts_at_the_end() -> None:
    assert list(split_events([(1.0, b"data: a\n\n"), (2.0, b"data: [DONE]\n")])) == [(1.0, b"a"), (2.0, b"[DONE]")]
    assert list(split_events([(1.0, b"data: a")])) == [(1.0, b"a")]


def test_times_of_a_request_are_its_events() -> None:
    request = measured([(11.0, text("a")), (11.2, text("b")), (11.6, text("c") + usage(4, 3)), (11.7, DONE)])
    assert request.ttft_s == pytest.approx(0.5)
    assert request.gaps_s() == pytest.approx([0.2, 0.4])
    assert request.tpot_s == pytest.approx(0.3)
    assert request.longest_gap_s == pytest.approx(0.4)
    assert request.e2e_s == pytest.approx(1.2)
    assert request.event_times_s == pytest.approx([1.0, 1.2, 1.6])
    assert (request.failure, request.mismatch) == ("", "")


def test_an_event_without_text_is_no_token() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    content = event({"choices": [{"index": 0, "delta": {"content": "a"}}]})
    thought = event({"choices": [{"index": 0, "delta": {"reasoning_content": "b"}}]})
    end = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    request = measured([(11.0, role), (11.5, content), (11.9, thought), (12.0, end + usage(4, 2) + DONE)], num_output=2)
    assert request.event_times_s == pytest.approx([1.5, 1.9])


def test_a_gap_is_shared_by_the_tokens_of_the_later_event_but_the_longest_is_not() -> None:
    request = measured([(11.0, text("a")), (11.3, text("bcd")), (11.4, text("e") + usage(4, 5) + DONE)], num_output=5)
    assert request.tokens_per_event == (1, 3, 1)
    assert request.gaps_s() == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert request.longest_gap_s == pytest.approx(0.3)


def test_a_servers_own_counts_win_over_lengths_of_texts() -> None:
    def counted(piece: str, num: int) -> bytes:
        return text(piece, usage={"prompt_tokens": 4, "completion_tokens": num})

    chunks = [(11.0, counted("aaaaaa", 1)), (11.1, counted("", 2)), (11.3, counted("b", 3)), (11.4, usage(4, 3) + DONE)]
    assert measured(chunks).tokens_per_event == (1, 2)


def test_token_ids_count_too() -> None:
    chunk = event({"choices": [{"index": 0, "text": "ab", "token_ids": [1, 2, 3]}]})
    assert measured([(11.0, chunk + usage(4, 3) + DONE)]).tokens_per_event == (3,)


def test_a_token_without_text_is_timed_by_the_event_that_ended_it() -> None:
    request = measured([(11.0, text("")), (11.1, usage(4, 1) + DONE)], num_output=1)
    assert (request.failure, request.event_times_s) == ("", pytest.approx((1.0,)))
    assert request.tpot_s is None


def test_usage_that_is_not_what_was_asked_is_told() -> None:
    chunks = [(11.0, text("a")), (11.1, usage(5, 2) + DONE)]
    assert measured(chunks).mismatch == "prompt_tokens 5, asked 4; completion_tokens 2, asked 3"


def test_without_usage_events_are_tokens() -> None:
    request = measured([(11.0, text("a")), (11.1, text("b") + DONE)])
    assert (request.num_input, request.num_output, request.has_usage, request.mismatch) == (4, 2, False, "")


def test_cached_tokens_and_phases_are_taken_from_the_last_event() -> None:
    last = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 1}, "baton_timings": {"queue_s": 0.25}}
    last["usage"] |= {"prompt_tokens_details": {"cached_tokens": 3}}  # pyright: ignore[reportOperatorIssue]
    request = measured([(11.0, text("a") + event(last) + DONE)])
    assert (request.num_cached, request.phases_s) == (3, {"queue_s": 0.25})


@pytest.mark.parametrize(
    ("status", "body", "failure", "detail"),
    [
        (503, b'{"error": {"message": "no worker"}}', "HTTP 503", "no worker"),
        (400, b'{"message": "bad"}', "HTTP 400", "bad"),
        (502, b"<html>", "HTTP 502", "<html>"),
        (200, text("a") + event({"error": {"message": "died"}}) + DONE, "error in the stream", "died"),
        (200, text("a"), "stream without its end", "the connection closed before [DONE]"),
        (200, DONE, "no text", "the stream ended without a token"),
        (200, b"data: {broken\n\n", "not an event stream", "JSON"),
    ],
)
def test_a_failure_has_a_kind_and_a_detail(status: int, body: bytes, failure: str, detail: str) -> None:
    request = measured([(11.0, body)], status=status)
    assert request.failure == failure
    assert detail in request.detail


def test_a_broken_conversation_keeps_its_own_kind_whatever_was_cut() -> None:
    assert measured([(11.0, text("a") + b"data: {cu")], failure="connection lost").failure == "connection lost"


def test_percentiles_are_interpolated() -> None:
    found = distribution([float(n) for n in range(1, 102)])
    assert found is not None
    assert (found.num, found.mean, found.p50, found.p90, found.p99, found.max) == (101, 51, 51, 91, 100, 101)
    assert distribution([]) is None


def test_a_run_sums_what_succeeded_and_counts_the_rest() -> None:
    requests = [done(11.0, 12.0, 14.0), done(11.0, 15.0), failed(), failed("HTTP 503"), failed(), failed(STOPPED)]
    figures = summarize(requests, Objectives())
    assert (figures.num_completed, figures.num_failed, figures.num_stopped) == (2, 3, 1)
    assert figures.failures == {"timeout": 2, "HTTP 503": 1}
    assert figures.duration_s == pytest.approx(5.0)
    assert figures.request_throughput == pytest.approx(2 / 5)
    assert figures.output_throughput == pytest.approx(5 / 5)
    assert figures.total_throughput == pytest.approx(13 / 5)
    assert figures.longest_gap_s == pytest.approx(4.0)
    assert figures.itl is not None
    assert figures.itl.num == 3
    assert figures.attainment is None


def test_a_run_of_nothing_has_no_figures_and_breaks_nothing() -> None:
    figures = summarize([], Objectives(ttft_s=1.0))
    assert (figures.num_completed, figures.ttft, figures.attainment) == (0, None, 0.0)


def test_attainment_counts_failures_as_misses_and_leaves_out_what_was_stopped() -> None:
    in_time, late = done(10.6, 10.7), done(11.6, 11.7)
    requests = [in_time, late, failed(), failed(STOPPED)]
    assert attainment(requests, Objectives(ttft_s=0.5)) == pytest.approx(1 / 3)
    assert attainment(requests, Objectives(ttft_s=2.0, tpot_s=0.2)) == pytest.approx(2 / 3)
    assert attainment(requests, Objectives(tpot_s=0.05)) == 0.0


def test_a_single_token_misses_no_time_per_token() -> None:
    assert attainment([done(10.6)], Objectives(tpot_s=0.001)) == 1.0


@pytest.mark.parametrize(
    ("ttft", "floor", "limit_s"),
    [
        ("250ms", "", 0.25),
        ("1.5s", "9s", 1.5),
        ("5x", "", 0.5),
        ("5x", "250ms", 0.5),
        ("2x", "250ms", 0.25),
        ("", "", None),
    ],
)
def test_a_multiple_is_of_the_unloaded_latency_and_has_a_floor(ttft: str, floor: str, limit_s: float | None) -> None:
    options = BenchObjectiveOptions(ttft_slo=ttft, ttft_floor=floor, tpot_slo="25ms")
    objectives = resolve(options, Unloaded(ttft_s=0.1, tpot_s=0.01, e2e_s=1.0))
    assert (objectives.ttft_s, objectives.tpot_s) == (limit_s, pytest.approx(0.025))


def test_unloaded_latencies_are_medians() -> None:
    unloaded = unloaded_latencies([done(10.6, 10.7), done(10.7, 10.9), done(12.5, 14.5)])
    assert (unloaded.ttft_s, unloaded.tpot_s, unloaded.e2e_s) == pytest.approx((0.2, 0.2, 0.4))
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        unloaded_latencies([done(10.6)])
