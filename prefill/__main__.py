"""`baton prefill`: one prefill worker process."""

import logging
from queue import SimpleQueue

from common.config import PrefillCommand
from common.engine.block_manager import BlockManager
from common.engine.worker_loop import Stop, WorkerLoop
from common.engine.worker_main import load_engine, run_until_stopped, unwind_on_sigterm, watch_gateways
from common.errors import ConfigError
from common.kv_source import KVSource
from common.links import Links
from common.log import set_up_logging
from common.service import LinkEvent
from common.supervisor.channel import SupervisorChannel
from common.wire import Role
from kvtransfer.server import KVServer
from kvtransfer.shm import SharedSegment, remove_dead_segments
from kvtransfer.transport import KVReleased, SenderEffect
from prefill.scheduler import PrefillScheduler
from prefill.service import PrefillService

logger = logging.getLogger(__name__)


def run(command: PrefillCommand, channel: SupervisorChannel | None) -> int:
    """Serve until stopped; return the exit code. Raises: ConfigError, ModelError when it cannot start."""
    options, transfer = command.worker, command.transfer
    set_up_logging(options.name or "prefill", command.log.log_level, command.log.log_format)
    for name in remove_dead_segments():  # their memory counts as used
        logger.info("removed %s, whose worker is gone", name)
    segments: list[SharedSegment] = []

    def allocate(num_bytes: int) -> memoryview | None:
        segment = _share_memory(num_bytes, transfer.kv_transport)
        if segment is None:
            return None
        segments.append(segment)
        return segment.memory

    unwind_on_sigterm()
    try:
        engine = load_engine(Role.PREFILL, command.model, options, channel, allocate)
        inbox: SimpleQueue[LinkEvent | KVReleased | Stop] = SimpleQueue()
        segment = segments[0] if segments else None
        server = KVServer(
            *(engine.peer, engine.cache.memory, engine.layout, 0, inbox.put),
            *(transfer.data_bind, options.advertise_host, segment),
        )
        source = KVSource(peer=engine.peer, layout=engine.layout, num_blocks=engine.num_blocks, shards=(server.shard,))
        links = Links(engine.peer, options.bind, options.advertise_host, lambda _: loop.current_status(), inbox.put)
        blocks = BlockManager(engine.num_blocks, engine.layout.block_size)
        scheduler = PrefillScheduler(
            blocks,
            max_batch_tokens=command.prefill.max_batch_prefill_tokens,
            max_step_s=command.prefill.max_step_ms / 1000,
            lease_s=transfer.kv_lease,
        )
        loop: WorkerLoop[KVReleased, SenderEffect] = WorkerLoop(
            PrefillService(engine.identity(links.address), source, blocks, scheduler),
            engine.runner,
            inbox=inbox,
            send=links.send,
            apply_transfer=server.apply,
            extra_counters=lambda: {**links.counters(), **server.counters(), **engine.runner.counters()},
            is_healthy=lambda: links.is_alive and server.is_alive,
            watch=watch_gateways(options.gateway),
            drain_timeout_s=options.drain_timeout,
            on_tick=engine.on_tick,
        )
        run_until_stopped(loop, links, inbox, options.gateway, channel)
        server.close()
    finally:
        for segment in segments:
            segment.close()
    return 0


def _share_memory(num_bytes: int, transport: str) -> SharedSegment | None:
    """A segment that decode workers on this host can read.

    Raises: ConfigError if shared memory is required and there is none.
    """
    if transport == "tcp":
        return None
    try:
        return SharedSegment(num_bytes)
    except ConfigError as error:
        if transport == "shm":
            raise
        logger.warning("KV is not shared but sent: %s", error)
        return None
