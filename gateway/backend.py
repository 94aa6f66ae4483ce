"""The seam between HTTP and the engine: what an API handler may ask for. Tests pass a fake."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from common.sampling import Finish, SamplingParams
from common.wire import WorkerStatus


class Update(NamedTuple):
    """New output tokens of one generation, in order, none missing. The last one carries `finish`."""

    token_ids: tuple[int, ...]
    finish: Finish | None


class Generation(Protocol):
    """One sequence under way. Iterating yields `Update`s until one has a finish.

    Raises (while iterating): RequestError, as the terminal frame, if the request cannot be completed:
    before the first update it still can be an HTTP status, later it is an error event.
    """

    num_cached_tokens: int
    """Prompt tokens found in the prefix cache; right once the first update is there."""

    def __aiter__(self) -> AsyncIterator[Update]: ...

    async def __anext__(self) -> Update: ...

    def cancel(self) -> None:
        """Drop it at both workers, whatever its stage. Idempotent, never blocks; harmless after the end."""
        ...


class Backend(Protocol):
    """The engine behind a gateway."""

    @property
    def max_context(self) -> int:
        """Tokens (prompt + output) of the longest sequence that the live pools can hold, at most the model's."""
        ...

    @property
    def num_active(self) -> int:
        """Generations under way."""
        ...

    def submit(self, prompts: Sequence[tuple[Sequence[int], SamplingParams]]) -> Sequence[Generation]:
        """Start one generation per (prompt_token_ids, params): all or none.

        Raises: RequestError 429 when that would exceed --max-concurrent-requests.
        """
        ...

    def missing_pools(self) -> list[str]:
        """Names of the pools without a live worker that others can work with; empty when ready."""
        ...

    def workers(self) -> Mapping[str, WorkerStatus]:
        """Last status of every live worker, by name, for /metrics."""
        ...
