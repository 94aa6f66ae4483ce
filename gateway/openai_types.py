"""Bodies of OpenAI's completions and chat completions: types and ranges. null is the same as absent.

Defaults are applied where the parameters are used: they differ between the two APIs.
"""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from gateway.http_errors import invalid, not_built

_MAX_N = 128

Positive = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(Struct):
    """When usage is reported in a stream: in a last chunk of its own, and in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(Struct, kw_only=True):
    """What both APIs have in common."""

    model: str | None = None
    max_tokens: Positive | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=_MAX_N)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


class CompletionBody(SamplingBody, kw_only=True):
    """POST /v1/completions. max_tokens may be 0 with echo: the prompt's text comes back, and nothing more."""

    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    best_of: Positive | None = None


class ContentPart(Struct):
    """One part of a message's content. Only parts of type text have a text."""

    type: str
    text: str | None = None


ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ChatMessage(Struct, omit_defaults=True):
    """A message, as the template sees it once its content is one text."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, object]] | None = None
    tool_call_id: str | None = None


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: str | None = None
    echo: bool | None = None


_NOT_BUILT: dict[str, tuple[object, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "suffix": ("",),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "priority": (0,),
    "kv_transfer_params": (),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "stream_interval": (1,),
    "cache_salt": (),
    "prompt_embeds": (),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
    "tools": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
"""Parameters that are known and not built, each with the values besides null that ask for nothing."""


def check_not_built(body: Mapping[str, object]) -> None:
    """Refuse what would silently be left out.

    Raises: RequestError 501 naming the parameter, or 400 where it could not be right anyway.
    """
    _check_contradictions(body)
    for name, defaults in _NOT_BUILT.items():
        value = body.get(name)
        if value is not None and not any(type(value) is type(default) and value == default for default in defaults):
            raise not_built(name)
    _check_response_format(body.get("response_format"))


def _check_contradictions(body: Mapping[str, object]) -> None:
    if body.get("tools") == []:
        raise invalid("tools must not be an empty array; leave it out instead", "tools")
    if body.get("tool_choice") not in (None, "none") and body.get("tools") is None:
        raise invalid("tool_choice needs tools", "tool_choice")
    if body.get("top_logprobs") not in (None, 0) and body.get("logprobs") in (None, False):
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.get("prompt_logprobs") is not None and body.get("stream") is True:
        raise invalid("prompt_logprobs are not available in a stream", "prompt_logprobs")


def _check_response_format(value: object) -> None:
    if value is None or value == {"type": "text"}:
        return
    kind: object = value.get("type") if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if kind not in ("json_object", "json_schema"):
        raise invalid("response_format.type must be text, json_object or json_schema", "response_format")
    if kind == "json_schema" and not isinstance(value.get("json_schema"), dict):  # pyright: ignore
        raise invalid("response_format.json_schema must be an object", "response_format")
    raise not_built("response_format")
