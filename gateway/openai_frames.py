"""OpenAI's answers: whole bodies, and the chunks of a stream.

What is the same in all chunks of a stream is encoded once: per token only the text is.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.choices import Choice, Delta, Output
from gateway.sse import encode_data

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str


def new_head(prefix: str, model: str, request_id: str | None) -> Head:
    """request_id: the client's own, which only its answer shows; the engine never sees it."""
    return Head(f"{prefix}-{request_id or uuid.uuid4().hex}", int(time.time()), model)


def usage_of(choices: Sequence[Choice]) -> Json:
    """Of all choices so far. A prompt counts once, whatever its number of outputs."""
    first_of_prompt = {id(choice.prompt): choice for choice in reversed(choices)}.values()
    num_prompt = sum(len(choice.prompt.token_ids) for choice in first_of_prompt)
    num_output = sum(choice.num_output_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in first_of_prompt)},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Where the two APIs differ.

    text:      the chunk's field around its JSON-encoded text, as a %-format
    no_text:   that field in the last chunk
    opening:   a choice's first chunk has this field before any text; empty for none
    """

    id_prefix: str
    object: str
    chunk_object: str
    text: bytes
    no_text: bytes
    opening: bytes
    choice: Callable[[str], Json]


CHAT = Shape(
    id_prefix="chatcmpl",
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    text=b'"delta":{"content":%b}',
    no_text=b'"delta":{}',
    opening=b'"delta":{"role":"assistant","content":""}',
    choice=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
)
COMPLETION = Shape(
    id_prefix="cmpl",
    object="text_completion",
    chunk_object="text_completion",
    text=b'"text":%b',
    no_text=b'"text":""',
    opening=b"",
    choice=lambda text: {"text": text},
)


def answer(shape: Shape, head: Head, choices: Sequence[Choice], outputs: Sequence[Output], *, with_ids: bool) -> Json:
    """The body of an answer that is not streamed."""
    return {
        "id": head.id,
        "object": shape.object,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": None,
        "choices": [_choice(shape, choice, output, with_ids) for choice, output in zip(choices, outputs, strict=True)],
        "usage": usage_of(choices),
    }


def _choice(shape: Shape, choice: Choice, output: Output, with_ids: bool) -> Json:
    fields: Json = {
        "index": choice.index,
        **shape.choice(choice.echo + output.text),
        "logprobs": None,
        "finish_reason": output.ended.reason,
        "stop_reason": output.ended.stop,
    }
    if with_ids:
        fields |= {"prompt_token_ids": choice.prompt.token_ids, "token_ids": output.token_ids}
    return fields


class ChunkWriter:
    """Turns the deltas of one stream into its SSE events.

    Token ids are held until there is a chunk to carry them: a step may bring no text.
    """

    def __init__(
        self, shape: Shape, head: Head, choices: Sequence[Choice], *, with_ids: bool, with_usage: bool
    ) -> None:
        """with_usage: in every chunk, not only at the end."""
        self._shape = shape
        self._choices = choices
        self._with_ids = with_ids
        self._with_usage = with_usage
        repeated = {"id": head.id, "object": shape.chunk_object, "created": head.created, "model": head.model}
        self._start = b"data: " + encode_data(repeated)[:-1]
        self._opened: set[int] = set()
        self._held_ids: list[list[int]] = [[] for _ in choices]
        self._owes_prompt_ids = set(range(len(choices))) if with_ids else set[int]()

    def events(self, delta: Delta) -> bytes:
        """The events of one delta; often none, and several at a choice's begin and end."""
        index, text, token_ids, ended = delta
        if self._with_ids:
            self._held_ids[index].extend(token_ids)
        events = b""
        if index not in self._opened:
            self._opened.add(index)
            events += self._opening(self._choices[index])
        if text:
            events += self._chunk(index, self._shape.text % encode_data(text), b"null", self._extra_ids(index))
        if ended is not None:
            reasons = b'"%b","stop_reason":%b' % (ended.reason.encode(), encode_data(ended.stop))
            events += self._chunk(index, self._shape.no_text, reasons, self._extra_ids(index))
        return events

    def usage(self) -> bytes:
        """The event without choices that include_usage asks for, last of all."""
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._start, encode_data(usage_of(self._choices)))

    def _opening(self, choice: Choice) -> bytes:
        field = self._shape.text % encode_data(choice.echo) if choice.echo else self._shape.opening
        if not field:
            return b""
        return self._chunk(choice.index, field, b"null", self._prompt_ids(choice.index))

    def _extra_ids(self, index: int) -> bytes:
        if not self._with_ids:
            return b""
        token_ids, self._held_ids[index] = self._held_ids[index], []
        return self._prompt_ids(index) + b',"token_ids":' + encode_data(token_ids)

    def _prompt_ids(self, index: int) -> bytes:
        """A choice's first chunk has them."""
        if index not in self._owes_prompt_ids:
            return b""
        self._owes_prompt_ids.remove(index)
        return b',"prompt_token_ids":' + encode_data(self._choices[index].prompt.token_ids)

    def _chunk(self, index: int, field: bytes, finish_reason: bytes, extra: bytes) -> bytes:
        usage = b',"usage":' + encode_data(usage_of(self._choices)) if self._with_usage else b""
        return b'%b,"choices":[{"index":%d,%b,"logprobs":null,"finish_reason":%b%b}]%b}\n\n' % (
            self._start,
            index,
            field,
            finish_reason,
            extra,
            usage,
        )
