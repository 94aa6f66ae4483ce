"""OpenAI bodies -> jobs: everything that can be refused is refused here, before any work is submitted."""

import asyncio
from collections.abc import Sequence
from typing import cast

import msgspec

from gateway.api import Api
from gateway.choices import Job, Prompt
from gateway.http_errors import invalid, not_built
from gateway.json_body import shown
from gateway.openai_types import ROLES, ChatBody, ChatMessage, CompletionBody, SamplingBody
from gateway.sampling_options import (
    check_length,
    check_max_tokens,
    check_token_ids,
    samples_of,
    sampling_params,
    text_options,
)

_DEFAULT_COMPLETION_TOKENS = 16
_LONG_TEXT_CHARS = 16_384
"""Tokenizing more than this would hold up every stream for over 10 ms (EPYC core, 2025-12): a thread does it."""


async def completion_job(body: CompletionBody, api: Api) -> Job:
    """Raises: RequestError 400, 404 or 501."""
    api.check_model(body.model)
    _check_stream_options(body)
    _check_best_of(body)
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens must be at least 1 without echo, got 0", "max_tokens")
    max_context = api.backend.max_context
    max_tokens = check_max_tokens(body.max_tokens, _DEFAULT_COMPLETION_TOKENS, max_context, "max_tokens")
    add_special_tokens = body.add_special_tokens is not False
    prompts = [
        await _tokenized(text, api, add_special_tokens) if isinstance(text, str) else _from_ids(text, api)
        for text in _split_prompts(body.prompt, api.limits.max_prompts)
    ]
    return _job(body, prompts, max_tokens, "prompt", api, echo=body.echo or False)


async def chat_job(body: ChatBody, api: Api) -> Job:
    """Raises: RequestError 400, 404 or 501."""
    api.check_model(body.model)
    _check_stream_options(body)
    if body.echo:
        raise not_built("echo")
    max_context = api.backend.max_context
    if body.max_completion_tokens is not None:
        max_tokens = check_max_tokens(body.max_completion_tokens, 0, max_context, "max_completion_tokens")
    else:
        max_tokens = check_max_tokens(body.max_tokens, max_context, max_context, "max_tokens")
    prompt = await _tokenized(_render(body, api), api, body.add_special_tokens or False)
    return _job(body, [prompt], max_tokens, "messages", api)


def _job(
    body: SamplingBody, prompts: Sequence[Prompt], max_tokens: int, param: str, api: Api, *, echo: bool = False
) -> Job:
    max_context = api.backend.max_context
    params = sampling_params(body, max_tokens, api)
    for prompt in prompts:
        check_length(prompt, max_context, param)
    return Job(
        prompts=tuple((prompt, samples_of(params, prompt, body.n or 1, body.seed, max_context)) for prompt in prompts),
        text=text_options(body, api.limits.max_stop_strings),
        echo=echo,
    )


def _check_stream_options(body: SamplingBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options need stream to be true", "stream_options")


def _check_best_of(body: CompletionBody) -> None:
    best_of, n = body.best_of, body.n or 1
    if best_of is not None and best_of < n:
        raise invalid(f"best_of must be at least n = {n}, got {best_of}", "best_of")
    if best_of is not None and best_of > n:
        raise not_built("best_of")


def _split_prompts(prompt: str | list[str | int | list[int]], max_prompts: int) -> list[str | list[int]]:
    """One text or list of ids per prompt."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if len(kinds) != 1:
        raise invalid(
            "prompt must be a text, a list of texts, of token ids or of such lists; not empty or mixed", "prompt"
        )
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    if len(prompt) > max_prompts:
        raise invalid(f"prompt must have at most {max_prompts} prompts, got {len(prompt)}", "prompt")
    return cast("list[str | list[int]]", prompt)


def _from_ids(token_ids: list[int], api: Api) -> Prompt:
    check_token_ids(token_ids, api.model.vocab_size, "prompt")
    return Prompt(token_ids)


async def _tokenized(text: str, api: Api, add_special_tokens: bool) -> Prompt:
    if text == "":
        return Prompt([], text)
    encode = api.model.tokenizer.encode
    if len(text) > _LONG_TEXT_CHARS:
        return Prompt(await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens), text)
    return Prompt(encode(text, add_special_tokens=add_special_tokens), text)


def _render(body: ChatBody, api: Api) -> str:
    template = api.model.template
    if template is None:
        raise invalid(f"the model {api.model.name} has no chat template; use /v1/completions", "messages")
    messages = [_message(message, at) for at, message in enumerate(body.messages)]
    variables = _template_variables(body)
    if not body.continue_final_message:
        add_generation_prompt = body.add_generation_prompt is not False
        return template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)
    if body.add_generation_prompt:
        raise invalid("continue_final_message and add_generation_prompt cannot both be true", "continue_final_message")
    return template.render_open(messages, variables=variables)


def _template_variables(body: ChatBody) -> dict[str, object]:
    """A template that knows of efforts finds the one asked for; the others ignore it."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return effort | (body.chat_template_kwargs or {})


def _message(message: ChatMessage, at: int) -> dict[str, object]:
    """For the template: content is always one text, and only the other fields that were given are there."""
    if message.role not in ROLES:
        param = f"messages[{at}].role"
        raise invalid(f"{param} must be one of {', '.join(ROLES)}, got {shown(message.role)}", param)
    fields: dict[str, object] = msgspec.to_builtins(message)
    return fields | {"content": _flatten(message, f"messages[{at}].content")}


def _flatten(message: ChatMessage, param: str) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    texts: list[str] = []
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise invalid(f"{param}: parts must be of type text and have one, got type {part.type}", param)
        texts.append(part.text)
    return "\n".join(texts)
