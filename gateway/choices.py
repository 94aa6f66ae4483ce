"""From a checked request to its outputs: what every API does with the engine."""

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from common.metrics import ABORT, ERROR, SequenceTimer
from common.sampling import Finish, FinishReason, SamplingParams
from gateway.api import Api
from gateway.backend import Generation, Update
from gateway.detokenizer import OutputText
from gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How output tokens become text; see OutputText."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Prompt:
    """text: what the client gave, or the rendered chat; None for token ids."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that passed every check.

    prompts: each with the parameters of its n samples; outputs are numbered prompt by prompt
    echo:    an output's text begins with its prompt
    """

    prompts: tuple[tuple[Prompt, tuple[SamplingParams, ...]], ...]
    text: TextOptions
    echo: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Once per prompt, however many samples it has."""
        return sum(len(prompt.token_ids) for prompt, _ in self.prompts)


class NoGeneration:
    """What an output of no tokens has for a generation: its end, at once."""

    num_cached_tokens = 0

    def __aiter__(self) -> "NoGeneration":
        return self

    async def __anext__(self) -> Update:
        return Update((), Finish(FinishReason.LENGTH))

    def cancel(self) -> None:
        """Nobody works on it."""


class Ended(NamedTuple):
    """stop: the stop string or token id that ended it; None for EOS and length."""

    reason: FinishReason
    stop: str | int | None


class Delta(NamedTuple):
    """What one output (by its index) gained. text may be empty; the last delta of an output has `ended`."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    ended: Ended | None


class Choice:
    """One output of a request: a generation, as text. Iterate it once; then `cancel` it in any case."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        generation: Generation,
        text: OutputText,
        timer: SequenceTimer,
        echo: str,
    ) -> None:
        """echo: precedes its text, which does not include it."""
        self.index = index
        self.prompt = prompt
        self.echo = echo
        self.num_output_tokens = 0
        self._generation = generation
        self._text = text
        self._timer = timer

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt; right once the first delta is there."""
        return self._generation.num_cached_tokens

    async def deltas(self) -> AsyncGenerator[Delta]:
        """One delta for each update of the generation, also without text.

        Raises: RequestError if it cannot be completed.
        """
        try:
            async for update in self._generation:
                piece = self._text.add(update.token_ids, update.finish)
                self.num_output_tokens += piece.num_tokens
                self._timer.add_tokens(piece.num_tokens)
                ended = _ended(piece.stop, update.finish)
                if ended is not None:
                    self._timer.end(ended.reason)
                    self._generation.cancel()
                yield Delta(self.index, piece.text, update.token_ids[: piece.num_tokens], ended)
                if ended is not None:
                    return
        except Exception:
            self._timer.end(ERROR)
            raise

    def cancel(self) -> None:
        """Drop the generation if it has not ended."""
        self._timer.end(ABORT)
        self._generation.cancel()


def _ended(stop: str | None, finish: Finish | None) -> Ended | None:
    if stop is not None:
        return Ended(FinishReason.STOP, stop)
    return None if finish is None else Ended(finish.reason, finish.stop_token_id)


@contextmanager
def started(job: Job, api: Api, arrival_s: float) -> Generator[list[Choice]]:
    """Submit all generations of a job; whatever is unfinished at the end is cancelled.

    arrival_s: by time.perf_counter.
    Raises: RequestError 429.
    """
    sequences = [(prompt, params) for prompt, samples in job.prompts for params in samples]
    generations = _submit(sequences, api)
    _count_request(job, api)
    tokenizer = api.model.tokenizer
    token_bytes = tokenizer.token_bytes(skip_special_tokens=job.text.skip_special_tokens)
    choices: list[Choice] = []
    for index, ((prompt, params), generation) in enumerate(zip(sequences, generations, strict=True)):
        text = OutputText(token_bytes, job.text.stops, include_stop=job.text.include_stop, min_tokens=params.min_tokens)
        timer = SequenceTimer(api.metrics, arrival_s)
        choices.append(Choice(index, prompt, generation, text, timer, _echo(prompt, tokenizer) if job.echo else ""))
    try:
        yield choices
    finally:
        for choice in choices:
            choice.cancel()


def _submit(sequences: Sequence[tuple[Prompt, SamplingParams]], api: Api) -> Sequence[Generation]:
    """No worker is needed for no tokens."""
    if not any(params.max_tokens for _, params in sequences):
        return [NoGeneration() for _ in sequences]
    return api.backend.submit([(prompt.token_ids, params) for prompt, params in sequences])


def _echo(prompt: Prompt, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text


def _count_request(job: Job, api: Api) -> None:
    metrics = api.metrics
    metrics.prompt_tokens.value += job.num_prompt_tokens
    for prompt, samples in job.prompts:
        metrics.request_prompt_tokens.observe(len(prompt.token_ids))
        metrics.request_n.observe(len(samples))
        metrics.request_max_tokens.observe(samples[0].max_tokens)


def merged(choices: Sequence[Choice]) -> AsyncGenerator[Delta]:
    """The deltas of all choices as they come. Close it when leaving early.

    Raises: RequestError as soon as one choice does.
    """
    return choices[0].deltas() if len(choices) == 1 else _interleaved(choices)


async def _interleaved(choices: Sequence[Choice]) -> AsyncGenerator[Delta]:
    queue: asyncio.Queue[Delta | asyncio.Task[None]] = asyncio.Queue()

    async def pump(choice: Choice) -> None:
        async for delta in choice.deltas():
            queue.put_nowait(delta)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, Delta):
                yield item
            else:
                num_open -= 1
                item.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # the first error was raised already


@dataclass(frozen=True, slots=True)
class Output:
    """A choice's whole outcome."""

    text: str
    token_ids: tuple[int, ...]
    ended: Ended


async def collect(choices: Sequence[Choice]) -> list[Output]:
    """All outputs, whole, by index.

    Raises: RequestError if one of them cannot be completed.
    """
    texts: list[list[str]] = [[] for _ in choices]
    token_ids: list[list[int]] = [[] for _ in choices]
    ends: dict[int, Ended] = {}
    async with aclosing(merged(choices)) as deltas:
        async for delta in deltas:
            texts[delta.choice].append(delta.text)
            token_ids[delta.choice].extend(delta.token_ids)
            if delta.ended is not None:
                ends[delta.choice] = delta.ended
    return [Output("".join(texts[i]), tuple(token_ids[i]), ends[i]) for i in range(len(choices))]
