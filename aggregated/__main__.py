"""`baton aggregated`: one worker that computes prompts and decodes, or the process of one of its ranks."""

from queue import SimpleQueue
from typing import Never, assert_never

from aggregated.service import AggregatedService
from common.config import AggregatedCommand
from common.engine.block_manager import BlockManager
from common.engine.rank import NoTransfer, run_rank
from common.engine.stop_signals import unwind_on_stop
from common.engine.worker_loop import Stop, WorkerLoop
from common.engine.worker_main import Engine, load_engine, run_until_stopped, watch_gateways
from common.links import Links
from common.log import set_up_logging
from common.own_host import advertised_host
from common.service import LinkEvent
from common.supervisor.channel import SupervisorChannel
from common.wire import Role
from decode.scheduler import DecodeScheduler
from decode.service import DecodeService
from prefill.scheduler import PrefillScheduler
from prefill.service import PrefillService


@unwind_on_stop()
def run(command: AggregatedCommand, channel: SupervisorChannel | None) -> int:
    """Serve until stopped; return the exit code. Raises: ConfigError, ModelError, GroupFailed."""
    set_up_logging(command.worker.name or "aggregated", command.log.log_level, command.log.log_format)
    if command.rank.rank_fd >= 0:
        return run_rank(Role.BOTH, command, lambda _: None, lambda part, report: NoTransfer())
    with load_engine(Role.BOTH, command, channel, lambda _: None) as engine:
        return _serve(command, engine, channel)


def _serve(command: AggregatedCommand, engine: Engine, channel: SupervisorChannel | None) -> int:
    options, max_num_seqs = command.worker, command.decode.max_num_seqs
    inbox: SimpleQueue[LinkEvent | Stop] = SimpleQueue()
    host = advertised_host(options.bind, options.advertise_host, options.gateway)
    links = Links(engine.peer, options.bind, host, lambda _: loop.current_status(), inbox.put)
    identity = engine.identity(links.address)
    blocks = BlockManager(engine.num_blocks, engine.layout.block_size)
    prompts = PrefillScheduler(
        blocks,
        max_batch_tokens=command.prefill.max_batch_prefill_tokens,
        max_step_s=command.prefill.max_step_ms / 1000,
    )
    service = AggregatedService(
        PrefillService(identity, None, blocks, prompts),
        DecodeService(identity, blocks, DecodeScheduler(blocks, max_num_seqs=max_num_seqs)),
        max_num_seqs=max_num_seqs,
    )
    loop = WorkerLoop[Never, Never](
        service,
        engine.runner,
        inbox=inbox,
        send=links.send,
        apply_transfer=assert_never,
        extra_counters=lambda: {**links.counters(), **engine.runner.counters()},
        is_healthy=lambda: links.is_alive and engine.is_alive,
        watch=watch_gateways(options.gateway),
        drain_timeout_s=options.drain_timeout,
        step_expected_s=max(engine.warm_up_s, command.prefill.max_step_ms / 1000),
        on_tick=engine.on_tick,
    )
    run_until_stopped(loop, links, inbox, engine, options, channel)
    return 0
