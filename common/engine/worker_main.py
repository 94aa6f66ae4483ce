"""What both kinds of worker do to start and to stop: the process around a `WorkerLoop`."""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from common.config import WorkerCommand
from common.engine.gateway_watch import GatewayWatch
from common.engine.group_runner import GroupRunner
from common.engine.group_start import start_ranks, with_shared_dir
from common.engine.loading import Allocate, LoadedShard, ModelPlan, load_shard, plan_model, size_cache
from common.engine.loop_watch import LoopWatch
from common.engine.runner import ModelRunner
from common.engine.step import ScheduledSequence, StepPlan
from common.engine.stop_signals import call_on_stop
from common.engine.worker import WorkerIdentity
from common.engine.worker_group import WorkerGroup
from common.engine.worker_loop import Stop, WorkerLoop
from common.errors import ConfigError
from common.gateway_finder import GatewayFinder
from common.hang import hangs_after_s
from common.ids import BlockId, PeerId, RequestId, SequenceKey
from common.kv_layout import KVLayout
from common.links import Links
from common.reachability import why_unreachable
from common.sampling import SamplingParams
from common.supervisor.channel import SupervisorChannel
from common.supervisor.runtime_dir import SHARED, RuntimeDir
from common.wire import Role
from common.worker_config import WorkerOptions

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 256
PROBE_S = 2.0
"""For a connection to a gateway that is missing."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model with its cache; where the worker is split over ranks, rank 0's part and its hold on the others.

    warm_up_s:   what the prompt took that it was warmed up with
    alive_file:  of health checks
    transfers:   what the other ranks' sides of the KV transfer say of themselves
    """

    peer: PeerId
    name: str
    plan: ModelPlan
    own: LoadedShard
    runner: ModelRunner | GroupRunner
    warm_up_s: float
    alive_file: Path | None
    group: WorkerGroup | None = None
    transfers: Sequence[bytes] = ()

    @property
    def num_blocks(self) -> int:
        """Of each rank alike."""
        return self.own.cache.num_blocks

    @property
    def layout(self) -> KVLayout:
        """Of whole blocks, with all KV heads."""
        return self.plan.layout

    def on_tick(self) -> None:
        """Several times a second, from between the steps: a worker that is stuck in one does not look healthy."""
        self.own.on_tick()
        if self.alive_file:
            self.alive_file.touch()

    def give_up(self, reason: str) -> None:
        """No step will be finished any more. Any thread; where there are other ranks, the main thread is let go."""
        if self.group:
            self.group.break_up(reason)
        else:
            logger.error("%s", reason)

    @property
    def is_alive(self) -> bool:
        return self.group is None or self.group.is_alive

    def identity(self, address: str) -> WorkerIdentity:
        """Of the worker whose inbox is at this address."""
        sizes = self.num_blocks, self.plan.config.vocab_size, self.plan.max_model_len
        return WorkerIdentity(self.name, address, self.layout, *sizes)


def load_engine(
    role: Role, command: WorkerCommand, channel: SupervisorChannel | None, allocate: Allocate
) -> AbstractContextManager[Engine]:
    """Size the cache, and then what `start_engine` does.

    Raises: ConfigError, ModelError; entering the context also GroupFailed.
    """
    worker = command.worker
    _check_alive_file(worker.alive_file)
    plan = plan_model(command.model, worker)
    num_blocks = size_cache(plan, worker.kv_cache_memory)
    return start_engine(plan, num_blocks, role, command, allocate, channel)


@contextmanager
def start_engine(
    plan: ModelPlan,
    num_blocks: int,
    role: Role,
    command: WorkerCommand,
    allocate: Allocate,
    channel: SupervisorChannel | None = None,
) -> Iterator[Engine]:
    """Start the other ranks, if there are any, and load the model. Blocks for seconds; the ranks end with the context.

    plan:        of this command
    num_blocks:  0: as many as there is room for
    Raises: ConfigError, ModelError, GroupFailed.
    """
    worker = command.worker
    name = worker.name or f"{role}-{socket.gethostname()}-{os.getpid()}"
    peer = PeerId(f"{name}#{secrets.token_hex(4)}")
    alive_file = Path(worker.alive_file) if worker.alive_file else None
    report = channel.progress if channel else _no_progress
    plan.placements[0].make_current()
    if len(plan.shards) == 1:
        own = load_shard(plan, 0, num_blocks, role, command, allocate, report=report)
        warm_up_s = _warm_up(own.runner, plan, own.cache.num_blocks)
        yield Engine(peer, name, plan, own, own.runner, warm_up_s, alive_file)
        return
    with ExitStack() as stack:
        if not worker.shared_dir:
            runtime_dir = RuntimeDir()
            stack.callback(runtime_dir.remove)
            command = with_shared_dir(command, str(runtime_dir.create().path / SHARED))
        group, collectives = stack.enter_context(start_ranks(command, peer, num_blocks, plan.placements[0]))
        own = load_shard(
            *(plan, 0, num_blocks, role, command, allocate),
            group=collectives,
            agree=group.agree_on_blocks,
            report=report,
        )
        runner = GroupRunner(own.runner, group, plan.shards)
        transfers = group.wait_until_ready()
        warm_up_s = _warm_up(runner, plan, own.cache.num_blocks)
        yield Engine(peer, name, plan, own, runner, warm_up_s, alive_file, group, transfers)


def _check_alive_file(path: str) -> None:
    """Whether it can be ours; that of a life before does not make this one healthy. Raises: ConfigError."""
    if not path:
        return
    file = Path(path)
    try:
        if file.exists() and (not file.is_file() or file.stat().st_size):
            raise ConfigError(f"alive_file must be new or an empty file, got {path}")
        file.touch()
        file.unlink()
    except OSError as error:
        raise ConfigError(f"alive_file must be a file that can be written, got {path}: {error.strerror}") from error


def _no_progress(what: str, fraction: float | None = None) -> None:
    """Nobody is looking."""


def _warm_up(runner: ModelRunner | GroupRunner, plan: ModelPlan, num_blocks: int) -> float:
    """Run a prompt and a token of nobody: what is allocated at the first use is then there. The blocks are free.

    Returns how long the prompt took, in seconds.
    """
    block_size = plan.layout.block_size
    num_tokens = min(WARM_UP_TOKENS, num_blocks * block_size, plan.max_model_len)
    durations_s: list[float] = []
    for start, end in ((0, num_tokens), (num_tokens - 1, num_tokens)):
        nobody = ScheduledSequence(
            key=SequenceKey(RequestId(""), 0),
            token_ids=[0] * (end - start),
            start=start,
            block_table=[BlockId(block) for block in range(-(-num_tokens // block_size))],
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            prompt_token_ids=[],
            output_token_ids=[],
        )
        durations_s.append(runner.execute(StepPlan((nobody,))).duration_s)
    runner.rest()
    return durations_s[0]


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


def run_until_stopped(
    loop: WorkerLoop[Any, Any],
    links: Links,
    inbox: "SimpleQueue[Any]",
    engine: Engine,
    options: WorkerOptions,
    channel: SupervisorChannel | None,
) -> None:
    """Join the gateways and serve until SIGTERM or SIGINT, then drain. A second signal leaves at once.

    When the loop hangs, the process ends here.
    """
    call_on_stop(lambda: inbox.put(Stop()))
    engine.on_tick()  # healthy before anybody hears of it
    links.start()
    finder = GatewayFinder(options.gateway, links.connect, links.disconnect)
    finder.start()
    limit_s = hangs_after_s(options.step_timeout, loop.step_expected_s)
    watch = LoopWatch(loop.current_turn, limit_s, engine.give_up)
    watch.start()
    if channel:
        channel.ready()
    logger.info("ready at %s", links.address)
    engine.runner.allow_binding()  # all threads have been started
    try:
        loop.run()
    finally:
        watch.close()
        finder.close()
        links.close(flush_s=0.5)
    logger.info("stopped")
