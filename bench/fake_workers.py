"""A prefill and a decode worker without a model: what is measured behind them are the gateways alone.

1. A `PrefillRequest` is answered after `prefill_s` with `PrefillDone`: a token, and a descriptor of as many blocks as
   the prompt would have.
2. A `DecodeRequest` joins the steps. Every `step_s` one `Tokens` a gateway has the next token of each of its sequences.
3. A sequence ends with its `max_tokens`; `Cancel` drops it.

Tokens are drawn by Zipf's law: a BPE vocabulary is in the order of frequency, so they are long and short words as a
text has them.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.gateway_figures import Served
from common.ids import BlockId, PeerId, RequestId
from common.kv_layout import KVLayout
from common.kv_source import KVDescriptor, KVShard, KVSource
from common.links import Links
from common.sampling import FinishReason
from common.service import LinkEvent, Received
from common.wire import (
    Cancel,
    DecodeRequest,
    PrefillDone,
    PrefillRequest,
    Role,
    Tokens,
    TokensEntry,
    WorkerStatus,
)

_FIRST_TOKEN_ID = 300
"""Below it are special tokens and single bytes, which show no text."""
_NUM_DRAWN = 65_536
_BLOCK_SIZE = 16
_NUM_BLOCKS = 100_000


@dataclass(slots=True)
class _Sequence:
    """One that decode works on. Mutable: num_tokens, of its output so far. first: of its tokens among the drawn."""

    gateway: PeerId
    request: DecodeRequest
    served: Served
    first: int
    num_tokens: int


class FakeWorkers:
    """Both workers, driven by the running loop; their links have threads of their own.

    served: by prompt, which a request has for itself
    """

    def __init__(
        self, folder: Path, model_hash: str, *, prefill_s: float, step_s: float, vocab_size: int, seed: int
    ) -> None:
        """folder: for their sockets.  Raises: ConfigError when one cannot be bound."""
        self.served: dict[tuple[int | str, ...], Served] = {}
        self._loop = asyncio.get_running_loop()
        self._prefill_s = prefill_s
        self._step_s = step_s
        self._token_ids = draw_text(vocab_size, seed)
        self._layout = KVLayout(
            name="fake",
            dtype="bfloat16",
            num_layers=1,
            num_kv_heads=1,
            head_dim=64,
            block_size=_BLOCK_SIZE,
            model_hash=model_hash,
        )
        self._running: dict[RequestId, _Sequence] = {}
        self._links = {role: self._open_links(role, folder) for role in (Role.PREFILL, Role.DECODE)}
        self._next_step_s = self._loop.time()
        self._timer = self._loop.call_soon(self._step)

    def start(self, gateways: Sequence[str]) -> None:
        """Join the gateways at these addresses."""
        for links in self._links.values():
            for gateway in gateways:
                links.connect(gateway)
            links.start()

    def close(self) -> None:
        self._timer.cancel()
        for links in self._links.values():
            links.close()

    def _open_links(self, role: Role, folder: Path) -> Links:
        address = f"ipc://{folder}/{role}"
        status = self._status(role, address)
        return Links(PeerId(f"{role}#0"), address, None, lambda _: status, self._deliver)

    def _status(self, role: Role, address: str) -> WorkerStatus:
        return WorkerStatus(
            name=role,
            address=address,
            role=role,
            layout=self._layout,
            num_blocks=_NUM_BLOCKS,
            num_free_blocks=_NUM_BLOCKS,
            max_context=_NUM_BLOCKS * _BLOCK_SIZE,
            num_waiting=0,
            num_waiting_tokens=0,
            num_running=0,
            is_draining=False,
            step_running_s=0.0,
            step_expected_s=0.0,
            counters={},
        )

    def _deliver(self, event: LinkEvent) -> None:
        """In the links' threads. A lost link needs nothing: the gateway sends its requests again."""
        if isinstance(event, Received):
            self._loop.call_soon_threadsafe(self._receive, event.peer, event.message, time.perf_counter())

    def _receive(self, gateway: PeerId, message: object, now: float) -> None:
        match message:
            case PrefillRequest():
                served = self.served[message.prompt_token_ids] = Served(now, [])
                self._loop.call_later(self._prefill_s, self._answer, gateway, message, served)
            case DecodeRequest():
                num_tokens = len(message.output_token_ids)
                served, first = self.served[message.prompt_token_ids], sum(message.prompt_token_ids)
                self._running[message.request_id] = _Sequence(gateway, message, served, first, num_tokens)
            case Cancel():
                self._running.pop(message.request_id, None)
            case _:
                pass

    def _answer(self, gateway: PeerId, request: PrefillRequest, served: Served) -> None:
        num_tokens = len(request.prompt_token_ids)
        num_blocks = -(-num_tokens // _BLOCK_SIZE)
        source = KVSource(
            peer=PeerId("prefill#0"),
            layout=self._layout,
            num_blocks=_NUM_BLOCKS,
            shards=(
                KVShard(
                    peer=PeerId("prefill#0"),
                    data_address="tcp://127.0.0.1:1",
                    shm_name="",
                    shm_nonce="",
                    first_head=0,
                    num_heads=self._layout.num_kv_heads,
                ),
            ),
        )
        kv = KVDescriptor(
            source=source,
            num_tokens=num_tokens,
            block_ids=tuple(map(BlockId, range(num_blocks))),
            checksums=tuple((2**63 + i,) for i in range(num_blocks)),
        )
        is_last = request.sampling.max_tokens == 1
        done = PrefillDone(
            request_id=request.request_id,
            attempt=request.attempt,
            index=0,
            token_id=self._token_at(sum(request.prompt_token_ids)),
            num_cached_tokens=0,
            finish_reason=FinishReason.LENGTH if is_last else None,
            stop_token_id=None,
            kv=None if is_last else kv,
        )
        served.sent_s.append(time.perf_counter())
        self._links[Role.PREFILL].send(gateway, done)

    def _step(self) -> None:
        self._next_step_s += self._step_s
        self._timer = self._loop.call_at(self._next_step_s, self._step)
        by_gateway: dict[PeerId, list[_Sequence]] = {}
        for sequence in self._running.values():
            by_gateway.setdefault(sequence.gateway, []).append(sequence)
        for gateway, sequences in by_gateway.items():
            now = time.perf_counter()
            if self._links[Role.DECODE].send(gateway, Tokens(entries=tuple(map(self._entry, sequences)))):
                self._advance(sequences, now)

    def _entry(self, sequence: _Sequence) -> TokensEntry:
        request, index = sequence.request, sequence.num_tokens
        return TokensEntry(
            request_id=request.request_id,
            attempt=request.attempt,
            index=index,
            token_ids=(self._token_at(sequence.first + index),),
            finish_reason=FinishReason.LENGTH if index + 1 == request.sampling.max_tokens else None,
            stop_token_id=None,
        )

    def _advance(self, sequences: Sequence[_Sequence], now: float) -> None:
        for sequence in sequences:
            sequence.served.sent_s.append(now)
            sequence.num_tokens += 1
            if sequence.num_tokens == sequence.request.sampling.max_tokens:
                del self._running[sequence.request.request_id]

    def _token_at(self, position: int) -> int:
        return self._token_ids[position % _NUM_DRAWN]


def draw_text(vocab_size: int, seed: int) -> list[int]:
    """Token ids whose frequencies fall as 1 / id."""
    logs = np.random.default_rng(seed).uniform(np.log(_FIRST_TOKEN_ID), np.log(vocab_size), _NUM_DRAWN)
    return np.exp(logs).astype(int).tolist()
