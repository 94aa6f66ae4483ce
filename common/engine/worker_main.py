"""What both kinds of worker do to start and to stop: the process around a `WorkerLoop`."""

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from mmap import mmap
from queue import SimpleQueue
from typing import Any

import torch

from common.config import ModelOptions, WorkerOptions
from common.engine.core_board import CoreBoard, find_cores
from common.engine.gateway_watch import GatewayWatch
from common.engine.kv_cache import KVCache, kv_layout, num_blocks_for
from common.engine.model_config import read_model_config
from common.engine.runner import ModelRunner, load_runner, resolve_dtype
from common.engine.step import ScheduledSequence, StepPlan
from common.engine.worker import WorkerIdentity
from common.engine.worker_loop import Stop, WorkerLoop
from common.errors import ConfigError
from common.ids import BlockId, PeerId, RequestId, SequenceKey
from common.kv_layout import KVLayout
from common.links import Links
from common.machine import give_back_freed_memory, num_available_cores, num_free_bytes, touch_pages
from common.model_files import find_model, longest_sequence
from common.reachability import why_unreachable
from common.sampling import SamplingParams
from common.supervisor.channel import SupervisorChannel
from common.wire import MIN_CONTEXT, Role

logger = logging.getLogger(__name__)

AUTO_MEMORY_SHARE = 0.2
"""Of the free memory, for one worker's KV cache: a prefill and a decode worker and their weights fit one host."""
AUTO_MAX_TOKENS = 65_536
"""A CPU computes no batch that needs more KV than this."""
WARM_UP_TOKENS = 256
PROBE_S = 2.0
"""For a connection to a gateway that is missing."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model with its cache."""

    peer: PeerId
    name: str
    layout: KVLayout
    num_blocks: int
    vocab_size: int
    max_model_len: int
    cache: KVCache
    runner: ModelRunner
    board: CoreBoard | None

    def on_tick(self) -> None:
        if self.board:
            self.board.refresh()

    def identity(self, address: str) -> WorkerIdentity:
        """Of the worker whose inbox is at this address."""
        return WorkerIdentity(self.name, address, self.layout, self.num_blocks, self.vocab_size, self.max_model_len)


def load_engine(
    role: Role,
    model: ModelOptions,
    worker: WorkerOptions,
    channel: SupervisorChannel | None,
    allocate: Callable[[int], mmap | memoryview | None],
) -> Engine:
    """Size and allocate the cache, then load the weights. Blocks for seconds.

    allocate: memory for the cache, given its size in bytes; None: let the cache allocate it
    Raises: ConfigError, ModelError.
    """
    num_cores = worker.cores or num_available_cores()
    cores, board = find_cores(
        *(worker.shared_dir, num_cores), borrows=worker.core_sharing == "elastic", is_urgent=role is Role.DECODE
    )
    torch.set_num_threads(1)  # native ops bring their own; a second set of threads would fight for the cores
    files = find_model(model.model)
    config = read_model_config(files)
    layout = kv_layout(config, resolve_dtype(model.dtype), worker.block_size, files.model_hash)
    max_model_len = longest_sequence(files, model.max_model_len)
    if max_model_len < MIN_CONTEXT:
        raise ConfigError(f"max_model_len must be at least {MIN_CONTEXT}, got {max_model_len}")
    num_blocks = _size_cache(layout, worker.kv_cache_memory, max_model_len)
    cache = _allocate_cache(layout, num_blocks, allocate)
    name = worker.name or f"{role}-{socket.gethostname()}-{os.getpid()}"
    report = channel.progress if channel else _no_progress
    runner = load_runner(
        *(files, config, cache, max_model_len, cores, worker.kernels, model.quantization),
        lambda fraction: report("loading weights", fraction),
    )
    _warm_up(runner, min(WARM_UP_TOKENS, num_blocks * layout.block_size, max_model_len))
    give_back_freed_memory()  # each weight was read, converted and packed: two copies of the largest are left over
    if runner.ops_name == "reference":
        torch.set_num_threads(cores.num_home())
    logger.info(
        "%s: %s, %s, KV cache of %d blocks (%d tokens, %.0f MB), %s kernels, %d cores",
        *(files.name, role, layout.dtype, num_blocks, num_blocks * layout.block_size),
        *(num_blocks * layout.block_bytes / 1e6, runner.ops_name, num_cores),
    )
    peer = PeerId(f"{name}#{secrets.token_hex(4)}")
    return Engine(peer, name, layout, num_blocks, config.vocab_size, max_model_len, cache, runner, board)


def _no_progress(what: str, fraction: float | None = None) -> None:
    """Nobody is looking."""


def _size_cache(layout: KVLayout, wanted_bytes: int, max_model_len: int) -> int:
    """Blocks of the cache: as many as asked for, else a share of the free memory.

    Raises: ConfigError when there is not so much, or not even one sequence of a few tokens fits.
    """
    free_bytes = num_free_bytes()
    if wanted_bytes > free_bytes:
        wanted, free = (f"{num_bytes / 1e9:.1f} GB" for num_bytes in (wanted_bytes, free_bytes))
        raise ConfigError(f"kv_cache_memory must fit into the {free} that are free, got {wanted}")
    if wanted_bytes:
        num_blocks = num_blocks_for(layout, wanted_bytes)
    else:
        useful = -(-max(AUTO_MAX_TOKENS, max_model_len) // layout.block_size)
        num_blocks = min(useful, num_blocks_for(layout, int(free_bytes * AUTO_MEMORY_SHARE)))
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_memory must hold at least 2 blocks of {layout.block_bytes} bytes, it holds {num_blocks}"
        )
    if num_blocks * layout.block_size < max_model_len:
        logger.warning(
            "the KV cache holds %d tokens: longer requests are refused, although the model takes %d",
            *(num_blocks * layout.block_size, max_model_len),
        )
    return num_blocks


def _allocate_cache(layout: KVLayout, num_blocks: int, allocate: Callable[[int], mmap | memoryview | None]) -> KVCache:
    """Raises: ConfigError when this process may not have so much, whatever is free."""
    num_bytes = num_blocks * layout.block_bytes
    try:
        cache = KVCache(layout, num_blocks, allocate(num_bytes))
    except OSError as error:
        raise ConfigError(f"kv_cache_memory: cannot allocate {num_bytes / 1e9:.1f} GB: {error}") from error
    # After a prompt of 1,024 tokens that was the first in its blocks, the second token came in 80 ms, later in 28.
    threading.Thread(target=touch_pages, args=(cache.memory,), name="cache pages", daemon=True).start()
    return cache


def _warm_up(runner: ModelRunner, num_tokens: int) -> None:
    """Run a prompt and a token of nobody: what is allocated at the first use is then there. The blocks are free."""
    num_blocks = -(-num_tokens // runner.kv_cache.layout.block_size)
    for start, end in ((0, num_tokens), (num_tokens - 1, num_tokens)):
        nobody = ScheduledSequence(
            key=SequenceKey(RequestId(""), 0),
            token_ids=[0] * (end - start),
            start=start,
            block_table=[BlockId(block) for block in range(num_blocks)],
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            prompt_token_ids=[],
            output_token_ids=[],
        )
        runner.execute(StepPlan((nobody,)))
    runner.rest()


def watch_gateways(addresses: Sequence[str]) -> GatewayWatch:
    """Finds out why gateways are missing in a thread of its own: names may take long to be resolved."""

    def on_missing(num_joined: int) -> None:
        threading.Thread(target=_log_missing, args=(addresses, num_joined), name="gateway probe", daemon=True).start()

    return GatewayWatch(len(addresses), on_missing, time.monotonic())


def _log_missing(addresses: Sequence[str], num_joined: int) -> None:
    """Where a connection can be made, a gateway that was joined may be known by another address."""
    for address in addresses:
        reason = why_unreachable(address, PROBE_S)
        if reason or not num_joined:
            logger.warning("no gateway at %s yet: %s", address, reason or "what listens there is none")


def unwind_on_sigterm() -> None:
    """Until `run_until_stopped`: SIGTERM ends the start by SystemExit, so that what it has made so far is removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def run_until_stopped(
    loop: WorkerLoop[Any, Any],
    links: Links,
    inbox: "SimpleQueue[Any]",
    gateways: Sequence[str],
    channel: SupervisorChannel | None,
) -> None:
    """Join the gateways and serve until SIGTERM or SIGINT, then drain. A second signal leaves at once."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: inbox.put(Stop()))
    links.start()
    for address in gateways:
        links.connect(address)
    if channel:
        channel.ready()
    logger.info("ready at %s", links.address)
    try:
        loop.run()
    finally:
        links.close(flush_s=0.5)
    logger.info("stopped")
