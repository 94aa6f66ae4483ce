"""What is asked and when."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from bench.prompts import read_prompts
from bench.trace import TraceRow, read_trace
from bench.workload import (
    Load,
    RequestSpec,
    draw_tokens,
    mixed_specs,
    parse_lengths,
    plan_run,
    poisson_times,
    random_specs,
    text_specs,
    trace_specs,
)
from common.errors import ConfigError

VOCAB = 1000


def tokens(spec: RequestSpec, *, seed: int = 0, salt: int = 0) -> list[int]:
    return draw_tokens(spec, seed=seed, vocab_size=VOCAB, salt=salt)


def row(t: float = 0.0, num_input: int = 10, hash_ids: tuple[int, ...] = ()) -> TraceRow:
    return TraceRow(t, num_input, 5, block=4 if hash_ids else 0, hash_ids=hash_ids)


@pytest.mark.parametrize(("text", "lengths"), [("128", (128, 128)), ("64-256", (64, 256)), ("256-64", (64, 256))])
def test_a_length_is_a_number_or_a_range(text: str, lengths: tuple[int, int]) -> None:
    assert parse_lengths(text) == lengths


def test_random_lengths_fill_their_ranges_and_follow_the_seed() -> None:
    specs = random_specs(500, (3, 5), (1, 2), seed=1)
    assert {spec.num_input for spec in specs} == {3, 4, 5}
    assert {spec.num_output for spec in specs} == {1, 2}
    assert specs == random_specs(500, (3, 5), (1, 2), seed=1)
    assert specs != random_specs(500, (3, 5), (1, 2), seed=2)


def test_a_prompt_has_its_length_and_ids_of_the_vocabulary() -> None:
    token_ids = tokens(RequestSpec(0, 5000, 1))
    assert len(token_ids) == 5000
    assert min(token_ids) >= 100
    assert max(token_ids) < VOCAB


def test_tokens_differ_by_request_seed_and_salt_and_by_nothing_else() -> None:
    first = tokens(RequestSpec(0, 50, 1))
    assert first == tokens(RequestSpec(0, 50, 9, group="streams"))
    others = [
        tokens(RequestSpec(1, 50, 1)),
        tokens(RequestSpec(0, 50, 1), seed=1),
        tokens(RequestSpec(0, 50, 1), salt=1),
    ]
    assert first not in others


def test_equal_hash_ids_are_equal_tokens_in_any_request() -> None:
    one, other = trace_specs([row(hash_ids=(7, 1)), row(num_input=12, hash_ids=(7, 2, 1))], 2, 0, 0)
    assert tokens(one)[:4] == tokens(other)[:4]
    assert tokens(one)[4:8] == tokens(other)[8:12]
    assert tokens(one)[4:8] != tokens(other)[4:8]


def test_what_hash_ids_do_not_cover_is_the_requests_own() -> None:
    one, other = trace_specs([row(hash_ids=(7, 1))] * 2, 2, 0, 0)
    assert tokens(one)[:8] == tokens(other)[:8]
    assert tokens(one)[8:] != tokens(other)[8:]
    assert len(tokens(one)) == 10


def test_a_prompt_shorter_than_its_blocks_is_cut() -> None:
    full, cut = trace_specs([row(hash_ids=(7, 1, 2)), row(num_input=6, hash_ids=(7, 1, 2))], 2, 0, 0)
    assert tokens(cut) == tokens(full)[:6]


def test_a_trace_begins_at_zero_and_is_cut_in_number_and_lengths() -> None:
    specs = trace_specs([row(5.0), row(6.5), row(9.0)], 2, 8, 3)
    assert [(spec.recorded_at_s, spec.num_input, spec.num_output) for spec in specs] == [(0.0, 8, 3), (1.5, 8, 3)]


def test_a_time_factor_stretches_a_trace() -> None:
    plan = plan_run(trace_specs([row(5.0), row(6.5)], 9, 0, 0), Load("trace", 0.5), seed=0, vocab_size=VOCAB, salt=0)
    assert [request.send_at_s for request in plan.requests] == [0.0, 0.75]
    assert plan.concurrency is None


def test_a_closed_loop_has_no_times() -> None:
    specs = random_specs(3, (4, 4), (1, 1), seed=0)
    plan = plan_run(specs, Load("concurrency", 2), seed=0, vocab_size=VOCAB, salt=0)
    assert [request.send_at_s for request in plan.requests] == [None] * 3
    assert plan.concurrency == 2


def test_poisson_times_rise_and_keep_the_rate_exactly() -> None:
    times = poisson_times(50, 2.0, seed=3)
    assert all(earlier < later for earlier, later in pairwise(times))
    assert times[-1] == pytest.approx(25.0)


def test_two_rates_of_one_seed_differ_in_scale_only() -> None:
    slow, fast = poisson_times(20, 1.0, seed=3), poisson_times(20, 4.0, seed=3)
    assert [time / 4 for time in slow] == pytest.approx(fast)
    assert poisson_times(20, 1.0, seed=4) != slow


def test_poisson_gaps_vary_as_exponential_ones_do() -> None:
    """Their standard deviation is their mean; of 5,000 gaps to within 5%, more than three standard errors."""
    times = [0.0, *poisson_times(5000, 1.0, seed=0)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    variance = sum((gap - 1) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(1.0, rel=0.05)


def test_texts_are_taken_again_from_the_first() -> None:
    specs = text_specs(["a", "b"], 3, (4, 4), seed=0)
    assert [(spec.text, spec.num_input, spec.num_output) for spec in specs] == [("a", 0, 4), ("b", 0, 4), ("a", 0, 4)]
    assert plan_run(specs, Load("rate", 1), seed=0, vocab_size=VOCAB, salt=0).requests[1].prompt == "b"


def test_long_prompts_come_while_streams_run() -> None:
    specs = mixed_specs(streams=(2, 128, 256), long=(3, 2048, 8), long_start_s=2.0, long_interval_s=0.5)
    assert [(spec.group, spec.recorded_at_s) for spec in specs] == [
        ("streams", 0.0),
        ("streams", 0.0),
        ("long prompts", 2.0),
        ("long prompts", 2.5),
        ("long prompts", 3.0),
    ]
    assert [spec.index for spec in specs] == list(range(5))


def test_a_trace_is_read_in_the_order_of_its_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"t":2,"in":3,"out":4,"session":"a"}\n\n{"t":1.5,"in":6,"out":1,"block":4,"hash_ids":[0,1]}\n')
    assert read_trace(str(path)) == [TraceRow(1.5, 6, 1, block=4, hash_ids=(0, 1)), TraceRow(2.0, 3, 4, "a")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ('{"t":0,"in":1}', "line 2: Object missing required field `out`"),
        ('{"t":-1,"in":1,"out":1}', "line 2: wanted t at least 0"),
        ('{"t":0,"in":0,"out":1}', "line 2: wanted t at least 0, in and out at least 1"),
        ('{"t":0,"in":1,"out":1,"hash_ids":[1]}', "line 2: hash_ids need `block`"),
    ],
)
def test_a_broken_row_is_refused_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"t":0,"in":1,"out":1}\n' + line)
    with pytest.raises(ConfigError, match=message):
        read_trace(str(path))


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ({"prompt": "p", "question": "q"}, "p"),
        ({"turns": ["first", "second"]}, "first"),
        ({"question": [[{"role": "user", "content": "nested"}]]}, "nested"),
        ({"input": "break\u2028inside"}, "break\u2028inside"),
    ],
)
def test_a_prompt_is_found_in_the_shapes_of_known_sets(tmp_path: Path, line: dict[str, object], prompt: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_prompts(str(path)) == [prompt]


def test_a_field_can_be_named_and_its_absence_is_told(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt":"p","transcript":"t"}')
    assert read_prompts(str(path), "transcript") == ["t"]
    with pytest.raises(ConfigError, match=r"line 1 has no text in summary; --prompt-field"):
        read_prompts(str(path), "summary")
