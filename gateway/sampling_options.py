"""A request's own options -> the parameters of each of its sequences."""

import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import replace

from common.errors import RequestError
from common.sampling import SamplingParams
from gateway.api import Api
from gateway.choices import Prompt, TextOptions
from gateway.http_errors import invalid
from gateway.openai_types import SamplingBody

_MAX_BIAS = 100.0
_INT64 = 2**63
_INTEGER = re.compile("-?[0-9]{1,18}")
_UINT64 = 2**64
_MIN_REPETITION_PENALTY, _MAX_REPETITION_PENALTY = 1e-30, 1e30
"""Logits times or divided by more would leave fp32. What is out of bounds is clamped: tokens are the same."""


def text_options(body: SamplingBody, max_stop_strings: int) -> TextOptions:
    """Raises: RequestError 400."""
    return TextOptions(
        stops=check_stops(body.stop, max_stop_strings),
        include_stop=body.include_stop_str_in_output or False,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def check_stops(stop: str | list[str] | None, max_stops: int) -> tuple[str, ...]:
    """Raises: RequestError 400."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in stops:
        raise invalid("stop cannot contain an empty string", "stop")
    if len(stops) > max_stops:
        raise invalid(f"stop must have at most {max_stops} strings, got {len(stops)}", "stop")
    return stops


def sampling_params(body: SamplingBody, max_tokens: int, api: Api) -> SamplingParams:
    """Everything but what differs between a request's sequences: the seed, and max_tokens where it is clamped.

    max_tokens: as asked for, already checked.
    Raises: RequestError 400.
    """
    if body.seed is not None and not -_INT64 <= body.seed < _INT64:
        wanted = f"greater_than_equal {-_INT64} and less_than_equal {_INT64 - 1}"
        raise invalid(f"seed must be an integer of 64 bits, {wanted}, got {body.seed}", "seed")
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(f"min_tokens must be at most max_tokens = {max_tokens}, got {min_tokens}", "min_tokens")
    stop_token_ids = tuple(dict.fromkeys(body.stop_token_ids or ()))
    check_token_ids(stop_token_ids, api.model.vocab_size, "stop_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=min(max(0, body.top_k or 0), api.model.vocab_size),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_clamp(_or(body.repetition_penalty, 1.0), _MIN_REPETITION_PENALTY, _MAX_REPETITION_PENALTY),
        logit_bias=_logit_bias(body.logit_bias or {}, api.model.vocab_size),
        ignore_eos=body.ignore_eos or False,
        eos_token_ids=api.model.eos_token_ids,
        stop_token_ids=stop_token_ids,
    )


def samples_of(
    params: SamplingParams, prompt: Prompt, n: int, seed: int | None, max_context: int
) -> tuple[SamplingParams, ...]:
    """The parameters of a prompt's n outputs: max_tokens clamped to the context, and a seed for each."""
    max_tokens = min(params.max_tokens, max_context - len(prompt.token_ids))
    seeds = (secrets.randbits(64) if seed is None else (seed + index) % _UINT64 for index in range(n))
    return tuple(replace(params, max_tokens=max_tokens, seed=own) for own in seeds)


def check_max_tokens(max_tokens: int | None, default: int, max_context: int, param: str) -> int:
    """Raises: RequestError 400 if even an empty prompt would leave no room for so many."""
    if max_tokens is not None and max_tokens > max_context:
        raise invalid(f"{param} must be at most the context of {max_context} tokens, got {max_tokens}", param)
    return default if max_tokens is None else max_tokens


def check_length(prompt: Prompt, max_context: int, param: str) -> None:
    """Raises: RequestError 400 if the prompt is empty or leaves no room for a token."""
    num_tokens = len(prompt.token_ids)
    if num_tokens == 0:
        raise invalid(f"{param} must not be empty", param)
    if num_tokens >= max_context:
        raise RequestError(
            400,
            f"This model's maximum context length is {max_context} tokens. However, your {param} resulted in "
            f"{num_tokens} tokens, which leaves no room for an output token. Please reduce the length of the {param}.",
            code="context_length_exceeded",
            param=param,
        )


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raises: RequestError 400."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise invalid(f"{param}: token id {token_id} is out of the vocabulary of {vocab_size}", param)


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    wrong = [key for key in bias if not _INTEGER.fullmatch(key)]
    if wrong:
        raise invalid(f"logit_bias contains keys that are no integer token ids: {wrong[:10]}", "logit_bias")
    clamped = {int(key): _clamp(value, -_MAX_BIAS, _MAX_BIAS) for key, value in bias.items()}
    check_token_ids(clamped, vocab_size, "logit_bias")
    return tuple(clamped.items())


def _clamp(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
