"""`baton prefill`: one prefill worker, or the process of one of its ranks."""

import logging
from collections.abc import Callable
from contextlib import ExitStack, closing
from queue import SimpleQueue

from common.config import PrefillCommand
from common.engine.block_manager import BlockManager
from common.engine.devices import place_ranks
from common.engine.rank import RankPart, run_rank
from common.engine.rank_channel import Applied, Transfer
from common.engine.stop_signals import unwind_on_stop
from common.engine.worker_group import WorkerGroup
from common.engine.worker_loop import Stop, WorkerLoop
from common.engine.worker_main import Engine, load_engine, run_until_stopped, watch_gateways
from common.errors import ConfigError
from common.kv_source import KVSource
from common.links import Links
from common.log import set_up_logging
from common.own_host import advertised_host
from common.service import LinkEvent
from common.shard_memory import ShardMemory
from common.supervisor.channel import SupervisorChannel
from common.wire import Role
from common.worker_config import WorkerOptions
from kvtransfer.group import GroupSender, RankSide, decode_shard
from kvtransfer.nixl import RegisteredMemory, check_nixl
from kvtransfer.server import KVServer
from kvtransfer.shm import SharedSegment, remove_dead_segments
from kvtransfer.transport import KVReleased, SenderEffect
from prefill.patience import HOLD_SHARE
from prefill.scheduler import PrefillScheduler
from prefill.service import PrefillService

logger = logging.getLogger(__name__)


class CacheMemory:
    """Memory for one cache: a segment that decode workers of this host can read, where that is possible.

    undo: what removes it in the end
    """

    def __init__(self, transport: str, undo: ExitStack) -> None:
        self.segment: SharedSegment | None = None
        self._transport = transport
        self._undo = undo

    def allocate(self, num_bytes: int) -> memoryview | None:
        """None: the cache need not be shared, or cannot be. Raises: ConfigError if it must be, and cannot."""
        if self._transport not in ("auto", "shm"):
            return None
        segment = SharedSegment(num_bytes)
        self._undo.callback(segment.close)
        try:
            self.segment = segment.create()
        except ConfigError as error:
            if self._transport == "shm":
                raise
            logger.warning("KV is not shared but sent: %s", error)
            return None
        return segment.memory

    def register(self, memory: memoryview) -> RegisteredMemory | None:
        """For NIXL, if blocks go that way. Raises: ConfigError."""
        if self._transport != "nixl":
            return None
        return self._undo.enter_context(closing(RegisteredMemory(memory)))


@unwind_on_stop()
def run(command: PrefillCommand, channel: SupervisorChannel | None) -> int:
    """Serve until stopped; return the exit code. Raises: ConfigError, ModelError, GroupFailed."""
    set_up_logging(command.worker.name or "prefill", command.log.log_level, command.log.log_format)
    for name in remove_dead_segments():  # their memory counts as used
        logger.info("removed %s, whose worker is gone", name)
    if command.transfer.kv_transport == "nixl":
        check_nixl()
    if command.transfer.kv_transport in ("shm", "nixl") and place_ranks(command.worker)[0].is_gpu:
        raise ConfigError(f"kv_transport {command.transfer.kv_transport}: a GPU's memory is sent by tcp only")
    with ExitStack() as undo:
        memory = CacheMemory(command.transfer.kv_transport, undo)
        if command.rank.rank_fd >= 0:
            return run_rank(Role.PREFILL, command, memory.allocate, lambda part, _: _rank_sender(command, part, memory))
        with load_engine(Role.PREFILL, command, channel, memory.allocate) as engine:
            return _serve(command, engine, memory, channel)


def _serve(command: PrefillCommand, engine: Engine, memory: CacheMemory, channel: SupervisorChannel | None) -> int:
    options = command.worker
    inbox: SimpleQueue[LinkEvent | KVReleased | Stop] = SimpleQueue()
    part = RankPart(engine.peer, engine.plan, engine.plan.shards[0], engine.own)
    server = _server(command, part, memory, inbox.put)
    host = advertised_host(options.bind, options.advertise_host, options.gateway)
    links = Links(engine.peer, options.bind, host, lambda _: loop.current_status(), inbox.put)
    blocks = BlockManager(engine.num_blocks, engine.layout.block_size)
    scheduler = PrefillScheduler(
        blocks,
        max_batch_tokens=command.prefill.max_batch_prefill_tokens,
        max_step_s=command.prefill.max_step_ms / 1000,
        hold_share=HOLD_SHARE if _shares_cores(options) else 0.0,
        lease_s=command.transfer.kv_lease,
    )
    loop: WorkerLoop[KVReleased, SenderEffect] = WorkerLoop(
        PrefillService(engine.identity(links.address), _source(engine, server), blocks, scheduler),
        engine.runner,
        inbox=inbox,
        send=links.send,
        apply_transfer=_apply_to_all(engine.group, server),
        extra_counters=lambda: {**links.counters(), **server.counters(), **engine.runner.counters()},
        is_healthy=lambda: links.is_alive and server.is_alive and engine.is_alive,
        watch=watch_gateways(options.gateway),
        drain_timeout_s=options.drain_timeout,
        step_expected_s=max(engine.warm_up_s, command.prefill.max_step_ms / 1000),
        on_tick=engine.on_tick,
    )
    run_until_stopped(loop, links, inbox, engine, options, channel)
    server.close()
    return 0


def _shares_cores(worker: WorkerOptions) -> bool:
    """Whether decode workers of this host may compute on our cores."""
    return bool(worker.shared_dir) and worker.core_sharing == "elastic" and not place_ranks(worker)[0].is_gpu


def _source(engine: Engine, server: KVServer) -> KVSource:
    """Where the KV of all ranks is."""
    shards = server.shard, *(decode_shard(transfer) for transfer in engine.transfers)
    return KVSource(peer=engine.peer, layout=engine.layout, num_blocks=engine.num_blocks, shards=shards)


def _apply_to_all(group: WorkerGroup | None, server: KVServer) -> Callable[[SenderEffect], None]:
    if group is None:
        return server.apply

    def publish(effect: bytes) -> None:
        group.log(Transfer(effect, is_answered=True))
        group.collect(Applied)

    return GroupSender(server, publish, lambda effect: group.tell(Transfer(effect, is_answered=False))).apply


def _rank_sender(command: PrefillCommand, part: RankPart, memory: CacheMemory) -> RankSide:
    server = _server(command, part, memory, _never_released)
    return RankSide(server, server.shard)


def _never_released(event: KVReleased) -> None:
    logger.warning("%s was released here, and not at rank 0", event.key)


def _server(
    command: PrefillCommand, part: RankPart, memory: CacheMemory, deliver: Callable[[KVReleased], None]
) -> KVServer:
    shard, data_bind = part.own.cache.shard_memory(part.shard.kv_heads), command.transfer.data_bind
    registered = memory.register(shard.memory) if isinstance(shard, ShardMemory) else None
    host = advertised_host(data_bind, command.worker.advertise_host, command.worker.gateway)
    return KVServer(part.peer, shard, deliver, data_bind, host, memory.segment, registered)
