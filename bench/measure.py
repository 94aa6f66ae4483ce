"""From the bytes of one request to its times. Pure.

Definitions, all of the client's clock:

- TTFT: from just before the request is sent to the arrival of the first event with text.
- Tokens of an event: what its `usage` counts beyond the event before, else its `token_ids`. Where a server sends
  neither, the usage at the end is shared out: each event with text has a token, and each one that is left goes to the
  event with the most text per token so far. With one token an event, as most servers send, that is exact.
- ITL: time between tokens. A gap between two events with text is shared evenly by the tokens of the later one, each
  of which is one sample. The longest gap is between events, not shared: it is what a reader waits.
- TPOT: mean time per token after the first: (last event - first event) / (tokens - 1).
- E2E: from sending to the end of the stream.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec

from bench.exchange import STOPPED, Exchange
from bench.sse import split_events


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """One request, measured. Times are seconds since its run began; durations are seconds.

    scheduled_s:       when it was to be sent; None in a closed loop
    event_times_s:     of the events with text
    tokens_per_event:  see the module
    num_input:         by the server's usage; what was asked, where it says nothing
    num_output:        by the server's usage; the events with text, where it says nothing
    ttft_s, tpot_s:    None without a first, or second, token
    failure:           kind; empty: it succeeded. Figures of a failed request are in no percentile
    mismatch:          usage and what was asked, where they differ
    phases_s:          what the server says about itself in `baton_timings`, in the order in which they passed
    """

    index: int
    group: str
    session: str
    scheduled_s: float | None
    sent_s: float
    ended_s: float
    event_times_s: tuple[float, ...]
    tokens_per_event: tuple[int, ...]
    num_input: int
    num_output: int
    num_cached: int
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    longest_gap_s: float
    failure: str
    detail: str
    mismatch: str
    has_usage: bool
    phases_s: Mapping[str, float]

    @property
    def is_done(self) -> bool:
        return not self.failure

    def gaps_s(self) -> list[float]:
        """Times between tokens."""
        pairs = zip(pairwise(self.event_times_s), self.tokens_per_event[1:], strict=True)
        return [(later - earlier) / num for (earlier, later), num in pairs for _ in range(num)]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None

    @property
    def num_characters(self) -> int:
        if self.delta is not None:
            return len(self.delta.content or "") + len(self.delta.reasoning_content or "")
        return len(self.text or "")


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None
    message: str | None = None
    baton_timings: dict[str, float] | None = None


class _Piece(NamedTuple):
    """An event with text. num_tokens: 0 where the server does not say."""

    time_s: float
    num_characters: int
    num_tokens: int


@dataclass(slots=True)
class _Stream:
    """An answer, read. Mutable: only while it is read.

    num_unseen:      tokens that the server counted in events without text, for the next that has some
    first_choice_s:  of the first event with a choice, text or not; 0 before it
    """

    pieces: list[_Piece]
    num_unseen: int = 0
    first_choice_s: float = 0.0
    usage: _Usage | None = None
    phases_s: Mapping[str, float] | None = None
    failure: str = ""
    detail: str = ""
    is_finished: bool = False


def measure(exchange: Exchange, started_s: float) -> RequestFigures:
    """started_s: when the run began, on the exchange's clock."""
    stream = _read(exchange)
    spec = exchange.request.spec
    usage = stream.usage or _Usage(spec.num_input, len(stream.pieces))
    times = tuple(piece.time_s - started_s for piece in stream.pieces)
    sent_s = exchange.sent_s - started_s
    return RequestFigures(
        index=spec.index,
        group=spec.group,
        session=spec.session,
        scheduled_s=exchange.request.send_at_s,
        sent_s=sent_s,
        ended_s=exchange.ended_s - started_s,
        event_times_s=times,
        tokens_per_event=tuple(_tokens_per_event(stream.pieces, usage.completion_tokens)),
        num_input=usage.prompt_tokens,
        num_output=usage.completion_tokens,
        num_cached=(usage.prompt_tokens_details or _Details()).cached_tokens or 0,
        ttft_s=times[0] - sent_s if times else None,
        tpot_s=(times[-1] - times[0]) / (usage.completion_tokens - 1)
        if times and usage.completion_tokens > 1
        else None,
        e2e_s=exchange.ended_s - exchange.sent_s,
        longest_gap_s=max((later - earlier for earlier, later in pairwise(times)), default=0.0),
        failure=stream.failure,
        detail=stream.detail,
        mismatch="" if stream.failure or stream.usage is None else _mismatch(exchange, stream.usage),
        has_usage=stream.usage is not None,
        phases_s=stream.phases_s or {},
    )


def _read(exchange: Exchange) -> _Stream:
    stream = _Stream([], failure=exchange.failure, detail=exchange.detail)
    if exchange.status not in (0, 200):
        stream.failure = f"HTTP {exchange.status}"
        stream.detail = _error_message(b"".join(data for _, data in exchange.chunks))
        return stream
    try:
        for time_s, data in split_events(exchange.chunks):
            if data == b"[DONE]":
                stream.is_finished = True
                break
            _take(stream, time_s, msgspec.json.decode(data, type=_Event))
    except msgspec.DecodeError as error:
        # Ctrl-C, or a lost connection, may have cut the last event: that is told already.
        if not stream.failure:
            stream.failure, stream.detail = "not an event stream", str(error)
    if not stream.failure and not stream.is_finished:
        stream.failure, stream.detail = "stream without its end", "the connection closed before [DONE]"
    if not stream.failure and not stream.pieces:
        _time_without_text(stream)
    return stream


def _time_without_text(stream: _Stream) -> None:
    """A short answer may be half a character: its tokens came at the latest with the event that ended it."""
    if stream.usage and stream.usage.completion_tokens and stream.first_choice_s:
        stream.pieces.append(_Piece(stream.first_choice_s, 1, 0))
    else:
        stream.failure, stream.detail = "no text", "the stream ended without a token"


def _take(stream: _Stream, time_s: float, event: _Event) -> None:
    if event.error is not None and not stream.failure:
        stream.failure = "error in the stream"
        stream.detail = event.error if isinstance(event.error, str) else event.error.message
    num_characters = sum(choice.num_characters for choice in event.choices)
    num_before = stream.usage.completion_tokens if stream.usage else 0
    num_tokens = sum(len(choice.token_ids or ()) for choice in event.choices)
    if event.usage is not None:
        num_tokens = event.usage.completion_tokens - num_before if event.choices else 0
        stream.usage = event.usage
    stream.num_unseen += num_tokens
    if event.choices and not stream.first_choice_s:
        stream.first_choice_s = time_s
    if num_characters:
        stream.pieces.append(_Piece(time_s, num_characters, stream.num_unseen))
        stream.num_unseen = 0
    stream.phases_s = event.baton_timings or stream.phases_s


def _tokens_per_event(pieces: Sequence[_Piece], num_tokens: int) -> list[int]:
    """How many tokens each event brought: at least one each, num_tokens together where it is not fewer.

    Counts that the server gave are taken as they are, if it gave one for each. Tokens that are left over then had no
    text yet or any more: nobody saw them come.
    """
    if all(piece.num_tokens > 0 for piece in pieces):
        return [piece.num_tokens for piece in pieces]
    counts = [1] * len(pieces)
    most_text_per_token: list[tuple[float, int]] = [
        (-piece.num_characters, index) for index, piece in enumerate(pieces)
    ]
    heapq.heapify(most_text_per_token)
    for _ in range(num_tokens - len(pieces) if pieces else 0):
        _, index = most_text_per_token[0]
        counts[index] += 1
        heapq.heapreplace(most_text_per_token, (-pieces[index].num_characters / counts[index], index))
    return counts


def _mismatch(exchange: Exchange, usage: _Usage) -> str:
    spec = exchange.request.spec
    differences: list[str] = []
    if spec.num_input and usage.prompt_tokens != spec.num_input:
        differences.append(f"prompt_tokens {usage.prompt_tokens}, asked {spec.num_input}")
    if usage.completion_tokens != spec.num_output:
        differences.append(f"completion_tokens {usage.completion_tokens}, asked {spec.num_output}")
    return "; ".join(differences)


def _error_message(body: bytes) -> str:
    """OpenAI's error body, or another server's, or its beginning."""
    try:
        event = msgspec.json.decode(body, type=_Event)
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")
    if isinstance(event.error, _Error):
        return event.error.message
    return event.error or event.message or body[:200].decode(errors="replace")


def was_stopped(request: RequestFigures) -> bool:
    return request.failure == STOPPED
