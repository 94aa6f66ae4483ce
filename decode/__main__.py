"""`baton decode`: one decode worker process."""

from queue import SimpleQueue

from common.config import DecodeCommand
from common.engine.block_manager import BlockManager
from common.engine.worker_loop import Stop, WorkerLoop
from common.engine.worker_main import load_engine, run_until_stopped, watch_gateways
from common.links import Links
from common.log import set_up_logging
from common.service import LinkEvent
from common.supervisor.channel import SupervisorChannel
from common.wire import Role
from decode.scheduler import DecodeScheduler
from decode.service import DecodeService
from kvtransfer.puller import KVPuller
from kvtransfer.transport import PullFinished, ReceiverEffect


def run(command: DecodeCommand, channel: SupervisorChannel | None) -> int:
    """Serve until stopped; return the exit code. Raises: ConfigError, ModelError when it cannot start."""
    options, transfer = command.worker, command.transfer
    set_up_logging(options.name or "decode", command.log.log_level, command.log.log_format)
    engine = load_engine(Role.DECODE, command.model, options, channel, lambda _: None)
    inbox: SimpleQueue[LinkEvent | PullFinished | Stop] = SimpleQueue()
    puller = KVPuller(
        *(engine.peer, engine.cache.memory, engine.layout, range(engine.layout.num_kv_heads), inbox.put),
        *(transfer.kv_transport, transfer.pull_timeout),
    )
    links = Links(engine.peer, options.bind, options.advertise_host, lambda _: loop.current_status(), inbox.put)
    blocks = BlockManager(engine.num_blocks, engine.layout.block_size)
    loop: WorkerLoop[PullFinished, ReceiverEffect] = WorkerLoop(
        DecodeService(
            engine.identity(links.address), blocks, DecodeScheduler(blocks, max_num_seqs=command.decode.max_num_seqs)
        ),
        engine.runner,
        inbox=inbox,
        send=links.send,
        apply_transfer=puller.apply,
        extra_counters=lambda: {**links.counters(), **puller.counters(), **engine.runner.counters()},
        is_healthy=lambda: links.is_alive and puller.is_alive,
        watch=watch_gateways(options.gateway),
        drain_timeout_s=options.drain_timeout,
        on_tick=engine.on_tick,
        itl_target_s=command.pacing.itl_target / 1000,
    )
    run_until_stopped(loop, links, inbox, options.gateway, channel)
    puller.close()
    return 0
