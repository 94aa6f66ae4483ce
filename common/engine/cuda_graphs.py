"""Decode steps as CUDA graphs: a step of few rows is hundreds of small kernels, whose launches take most of its time.

A graph has the sizes and addresses that it was captured with. So there is one for each of some numbers of rows, all of
them over the same inputs, and a batch takes the next larger one: rows that nobody asked for write into the cache's
spare block, and their logits are dropped.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from common.engine.batch import Batch
from common.engine.device_cache import DeviceKVCache
from kernels.token_rows import DecodeRows, TokenRows

Replay = Callable[[], Tensor]
"""Computes anew, from what is in the inputs by then; the result is overwritten by the next one."""


class Model(Protocol):
    """What is captured."""

    def forward(self, batch: Batch, kv_cache: DeviceKVCache) -> Tensor: ...


def graph_sizes(max_rows: int) -> list[int]:
    """Numbers of rows: powers of two up to 8, multiples of 8, and from 128 on steps of an eighth or less."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + max(8, 2 ** (sizes[-1].bit_length() - 4)))
    return [size for size in sizes if size < max_rows] + [max_rows]


class DecodeGraphs:
    """Decode steps of one model over one cache. Mutable: the inputs, which each step overwrites."""

    def __init__(
        self,
        model: Model,
        cache: DeviceKVCache,
        sizes: Sequence[int],
        max_model_len: int,
        capture: Callable[[Callable[[], Tensor]], Replay],
        report: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        """Captures one graph after the other, the largest first, whose memory the others share.

        sizes:    numbers of rows, ascending
        capture:  `CudaCapture`, or what stands for it
        """
        self._sizes = sizes
        rows, width = sizes[-1], -(-max_model_len // cache.layout.block_size)
        device = cache.blocks.device
        spare_slot = cache.spare_block * cache.layout.block_size
        self._spare_block, self._spare_slot = cache.spare_block, spare_slot
        self._input_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots = torch.full((rows,), spare_slot, dtype=torch.int64, device=device)
        self._block_tables = torch.full((rows, width), cache.spare_block, dtype=torch.int32, device=device)
        self._context_lens = torch.ones(rows, dtype=torch.int32, device=device)
        self._all_rows = torch.arange(rows, device=device)
        self._replays: dict[int, Replay] = {}
        for number, size in enumerate(reversed(sizes)):
            batch = self._inputs(size)
            self._replays[size] = capture(lambda batch=batch: model.forward(batch, cache))
            report((number + 1) / len(sizes))

    def takes(self, batch: Batch) -> bool:
        """Whether it is a decode step, every row of it sampled, that is not too large."""
        rows = batch.rows
        return rows.prefill is None and len(batch.sampled_rows) == rows.num_decode_rows <= self._sizes[-1]

    def forward(self, batch: Batch) -> Tensor:
        """batch: one that it takes, in the host's memory. Returns its logits, [num_rows, vocab_size] fp32."""
        decode, num_rows = batch.rows.decode, batch.rows.num_decode_rows
        assert decode is not None, "a decode step has rows"
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        self._input_ids[:num_rows].copy_(batch.input_ids, non_blocking=True)
        self._positions[:num_rows].copy_(batch.rows.positions, non_blocking=True)
        self._slots[:num_rows].copy_(batch.rows.slot_mapping, non_blocking=True)
        self._block_tables[:num_rows, : decode.block_tables.shape[1]].copy_(decode.block_tables, non_blocking=True)
        self._context_lens[:num_rows].copy_(decode.context_lens, non_blocking=True)
        if num_rows < size:
            self._slots[num_rows:size] = self._spare_slot
            self._block_tables[num_rows:size, :1] = self._spare_block
            self._context_lens[num_rows:size] = 1
            self._positions[num_rows:size] = 0
        return self._replays[size]()[:num_rows]

    def _inputs(self, size: int) -> Batch:
        decode = DecodeRows(self._block_tables[:size], self._context_lens[:size])
        rows = TokenRows(self._positions[:size], self._slots[:size], size, decode, None)
        return Batch(self._input_ids[:size], rows, self._all_rows[:size], ())


class CudaCapture:
    """Captures graphs that share one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        """Runs it once before: what is compiled or allocated at the first use must not be captured."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads copy blocks meanwhile, which a capture that looks at all threads would take for a mistake.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
