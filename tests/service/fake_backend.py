"""An engine behind the gateway that decides its tokens by the parameters alone."""

import asyncio
import queue
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import RequestError
from common.ids import PeerId
from common.kv_layout import KVLayout
from common.sampling import Finish, SamplingParams, check_finish
from common.wire import Role, WorkerStatus
from gateway.backend import Generation, Update

FILLER_ID = 284
"""What comes out where EOS or a stop token is masked."""


@dataclass
class Script:
    """What every generation does until it is changed.

    token_ids:          the output, over and over, where no logit_bias of +100 forces a token
    tokens_per_update:  of every update but the first, which has one
    stall_after:        this many tokens come, then nothing more
    fail_after:         this many tokens come, then error is raised
    """

    token_ids: Sequence[int] = (1, 2)
    tokens_per_update: int = 1
    num_cached_tokens: int = 0
    stall_after: int | None = None
    fail_after: int | None = None
    error: Exception = field(default_factory=lambda: RequestError(503, "no worker", "service_unavailable"))


class FakeBackend:
    """One scripted engine. `cancelled` has the prompt of every generation that was dropped before its end."""

    def __init__(self, max_context: int) -> None:
        self.max_context = max_context
        self.max_concurrent = 64
        self.num_active = 0
        self.script = Script()
        self.missing: list[str] = []
        self.submitted: list[tuple[list[int], SamplingParams]] = []
        self.cancelled: queue.Queue[list[int]] = queue.Queue()

    def submit(self, prompts: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Generation]:
        if self.num_active + len(prompts) > self.max_concurrent:
            raise RequestError(429, "too many requests", "rate_limit_error", retry_after_s=1)
        self.submitted += [(list(token_ids), params) for token_ids, params in prompts]
        self.num_active += len(prompts)
        return [FakeGeneration(self, list(token_ids), params, self.script) for token_ids, params in prompts]

    def missing_pools(self) -> list[str]:
        return self.missing

    def workers(self) -> Mapping[str, WorkerStatus]:
        return {
            "p0": fake_status("p0", Role.PREFILL, {"prefix_hits": 3.0}),
            "d0": fake_status("d0", Role.DECODE, {"steps": 7.0, "odd-name": 1.0}),
        }


class FakeGeneration:
    """Follows its script, as the engine's generations follow their model."""

    def __init__(
        self, backend: FakeBackend, prompt_token_ids: list[int], params: SamplingParams, script: Script
    ) -> None:
        self.num_cached_tokens = script.num_cached_tokens
        self._backend = backend
        self._prompt_token_ids = prompt_token_ids
        self._params = params
        self._script = script
        self._forced = next((token_id for token_id, bias in params.logit_bias if bias >= 100), None)
        self._output: list[int] = []
        self._is_over = False

    def __aiter__(self) -> AsyncIterator[Update]:
        return self

    async def __anext__(self) -> Update:
        if self._is_over:
            raise StopAsyncIteration
        await asyncio.sleep(0)  # lets others run, as the real one does
        wanted = self._script.tokens_per_update if self._output else 1
        new: list[int] = []
        finish: Finish | None = None
        while len(new) < wanted and finish is None and not self._is_due(self._script.stall_after):
            if self._is_due(self._script.fail_after):
                self._end()
                raise self._script.error
            new.append(self._sample())
            finish = check_finish(self._params, self._output)
        if not new:
            await asyncio.Event().wait()
        if finish is not None:
            self._end()
        return Update(tuple(new), finish)

    def cancel(self) -> None:
        if not self._is_over:
            self._end()
            self._backend.cancelled.put(self._prompt_token_ids)

    def _is_due(self, num_tokens: int | None) -> bool:
        return num_tokens is not None and len(self._output) >= num_tokens

    def _sample(self) -> int:
        scripted = self._script.token_ids[len(self._output) % len(self._script.token_ids)]
        token_id = scripted if self._forced is None else self._forced
        if len(self._output) + 1 < self._params.min_tokens and token_id in self._params.ending_token_ids:
            token_id = FILLER_ID
        self._output.append(token_id)
        return token_id

    def _end(self) -> None:
        self._is_over = True
        self._backend.num_active -= 1


def fake_status(name: str, role: Role, counters: dict[str, float]) -> WorkerStatus:
    layout = KVLayout(
        name="fake", dtype="float32", num_layers=1, num_kv_heads=1, block_size=4, head_dim=2, model_hash="hash"
    )
    return WorkerStatus(
        name=name,
        address=PeerId("tcp://127.0.0.1:1"),
        role=role,
        layout=layout,
        num_blocks=100,
        num_free_blocks=75,
        max_context=400,
        num_waiting=0,
        num_waiting_tokens=0,
        num_running=0,
        is_draining=False,
        step_running_s=0.0,
        step_expected_s=0.0,
        counters=counters,
    )
