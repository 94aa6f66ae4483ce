"""A request's sampling parameters, and when its output is finished.

The gateway validates what a client sent and fills every field; workers take what the types here let through.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

Natural = Annotated[int, Meta(ge=0)]
"""Also a token id; the worker knows which of them its model has."""
NotNegative = Annotated[float, Meta(ge=0)]


class FinishReason(StrEnum):
    """Why a sequence ended, by OpenAI's names."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens of one sequence are chosen.

    max_tokens:       output tokens at most, already clamped to the context
    min_tokens:       EOS and stop tokens are masked while fewer tokens than this were generated
    temperature:      0 is greedy
    top_k:            0 is off
    seed:             64 bits, unsigned; the gateway draws one where the client gave none
    logit_bias:       (token_id, bias) pairs, added before everything else
    eos_token_ids:    the model's end tokens; ignored with ignore_eos
    stop_token_ids:   the client's own; honoured in any case
    repetition_penalty covers prompt and output, presence and frequency penalty the output only.
    """

    max_tokens: Natural
    min_tokens: Natural = 0
    temperature: NotNegative = 1.0
    top_p: NotNegative = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31)] = 0
    min_p: NotNegative = 0.0
    seed: Natural = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[Natural, float], ...] = ()
    ignore_eos: bool = False
    eos_token_ids: tuple[Natural, ...] = ()
    stop_token_ids: tuple[Natural, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the sequence once min_tokens are out."""
        return self.stop_token_ids if self.ignore_eos else self.eos_token_ids + self.stop_token_ids


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a sequence. stop_token_id: the client's stop token that ended it, None for EOS and length."""

    reason: FinishReason
    stop_token_id: int | None = None


def check_finish(params: SamplingParams, output_token_ids: Sequence[int]) -> Finish | None:
    """Say whether the sequence ended with its last output token.

    EOS is looked at first, then stop tokens, then length: EOS as the last allowed token is a "stop".
    """
    num_tokens = len(output_token_ids)
    last = output_token_ids[-1]
    if num_tokens >= params.min_tokens:
        if not params.ignore_eos and last in params.eos_token_ids:
            return Finish(FinishReason.STOP)
        if last in params.stop_token_ids:
            return Finish(FinishReason.STOP, last)
    if num_tokens >= params.max_tokens:
        return Finish(FinishReason.LENGTH)
    return None
