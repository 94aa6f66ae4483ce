"""What is asked, and when: pure, and a function of the seed alone."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from bench.trace import TraceRow

_FIRST_TOKEN_ID = 100
"""Ids below it are special tokens or single bytes in most vocabularies."""

_LENGTHS, _ARRIVALS, _PROMPTS, _BLOCKS = range(4)
"""What random numbers are for: each has a generator of its own."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What is asked, without tokens.

    text:            the prompt, if it is a text; num_input is then 0: the server counts
    recorded_at_s:   in the trace
    group:           of which part of a mixed load
    """

    index: int
    num_input: int
    num_output: int
    text: str = ""
    block: int = 0
    hash_ids: tuple[int, ...] = ()
    session: str = ""
    recorded_at_s: float = 0.0
    group: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive.

    value: requests under way (concurrency), requests/s (rate), a factor on recorded times (trace); 0 for mixed
    """

    kind: Literal["concurrency", "rate", "trace", "mixed"]
    value: float = 0.0

    def __str__(self) -> str:
        match self.kind:
            case "concurrency":
                return f"concurrency {self.value:g}"
            case "rate":
                return f"{self.value:.3g} req/s"
            case "trace":
                return f"trace × {self.value:g}"
            case "mixed":
                return "mixed"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """prompt: token ids, or a text.  send_at_s: since the run began; None: when another one ends."""

    spec: RequestSpec
    prompt: Sequence[int] | str
    send_at_s: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """concurrency: requests under way at most; None: they are sent at their times."""

    load: Load
    requests: tuple[PlannedRequest, ...]
    concurrency: int | None


def parse_lengths(text: str) -> tuple[int, int]:
    """`128` or `64-256`, both ends included."""
    numbers = sorted(int(number) for number in re.findall(r"\d+", text))
    return numbers[0], numbers[-1]


def random_specs(num: int, input_len: tuple[int, int], output_len: tuple[int, int], seed: int) -> list[RequestSpec]:
    """Lengths uniform over both ranges."""
    rng = np.random.default_rng([seed, _LENGTHS])
    inputs, outputs = _uniform(rng, input_len, num), _uniform(rng, output_len, num)
    return [RequestSpec(i, inputs[i], outputs[i]) for i in range(num)]


def text_specs(texts: Sequence[str], num: int, output_len: tuple[int, int], seed: int) -> list[RequestSpec]:
    """The texts in their order, again from the first where they do not suffice."""
    outputs = _uniform(np.random.default_rng([seed, _LENGTHS]), output_len, num)
    return [RequestSpec(i, 0, outputs[i], text=texts[i % len(texts)]) for i in range(num)]


def trace_specs(rows: Sequence[TraceRow], num: int, max_input_len: int, max_output_len: int) -> list[RequestSpec]:
    """The first `num` rows, the first at time 0. max_*_len: 0 for no limit."""
    return [
        RequestSpec(
            index,
            min(row.num_input, max_input_len or row.num_input),
            min(row.num_output, max_output_len or row.num_output),
            block=row.block,
            hash_ids=row.hash_ids,
            session=row.session,
            recorded_at_s=row.t - rows[0].t,
        )
        for index, row in enumerate(islice(rows, num))
    ]


def poisson_times(num: int, rate: float, seed: int) -> list[float]:
    """rate: requests/s. Returns seconds, rising, the last at num / rate.

    The process is conditioned on its mean: gaps are scaled so that `num` requests take num / rate, whatever the seed.
    A probe's rate is then what it says, and two rates differ in their scale alone.
    """
    gaps = np.random.default_rng([seed, _ARRIVALS]).exponential(size=num)
    times = np.cumsum(gaps)
    return (times / times[-1] * num / rate).tolist()


def plan_run(specs: Sequence[RequestSpec], load: Load, *, seed: int, vocab_size: int, salt: int) -> Plan:
    """salt: of the run: another one gives other tokens, of the same lengths and equal where they were equal."""
    times: Sequence[float | None]
    match load.kind:
        case "concurrency":
            times = [None] * len(specs)
        case "rate":
            times = poisson_times(len(specs), load.value, seed)
        case "trace":
            times = [spec.recorded_at_s * load.value for spec in specs]
        case "mixed":
            times = [spec.recorded_at_s for spec in specs]
    requests = [
        PlannedRequest(spec, spec.text or draw_tokens(spec, seed=seed, vocab_size=vocab_size, salt=salt), send_at_s)
        for spec, send_at_s in zip(specs, times, strict=True)
    ]
    return Plan(load, tuple(requests), int(load.value) if load.kind == "concurrency" else None)


def draw_tokens(spec: RequestSpec, *, seed: int, vocab_size: int, salt: int) -> list[int]:
    """A block's tokens come from its hash id, whatever request it is in; the rest from the request's index."""
    pieces: Iterator[list[int]] = (
        _tokens([seed, salt, _BLOCKS, hash_id], spec.block, vocab_size) for hash_id in spec.hash_ids
    )
    token_ids = [token_id for piece in pieces for token_id in piece][: spec.num_input]
    num_unique = spec.num_input - len(token_ids)
    return token_ids + _tokens([seed, salt, _PROMPTS, spec.index], num_unique, vocab_size)


def mixed_specs(
    *, streams: tuple[int, int, int], long: tuple[int, int, int], long_start_s: float, long_interval_s: float
) -> list[RequestSpec]:
    """Streams that start at once, and long prompts that come while they run. streams, long: number, input, output."""
    num_streams, num_long = streams[0], long[0]
    specs = [RequestSpec(i, streams[1], streams[2], group="streams") for i in range(num_streams)]
    return specs + [
        RequestSpec(
            num_streams + i,
            long[1],
            long[2],
            recorded_at_s=long_start_s + i * long_interval_s,
            group="long prompts",
        )
        for i in range(num_long)
    ]


def _tokens(key: Sequence[int], num: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(key).integers(_FIRST_TOKEN_ID, vocab_size, num).tolist()


def _uniform(rng: np.random.Generator, length: tuple[int, int], num: int) -> list[int]:
    return rng.integers(length[0], length[1], num, endpoint=True).tolist()
