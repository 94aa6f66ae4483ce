"""`baton decode`: one decode worker, or the process of one of its ranks."""

from collections.abc import Callable
from queue import SimpleQueue

from common.config import DecodeCommand
from common.engine.block_manager import BlockManager
from common.engine.rank import RankPart, run_rank
from common.engine.rank_channel import Transfer, TransferEvent
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
from kvtransfer.group import GroupReceiver, RankSide, encode_for_rank
from kvtransfer.nixl import check_nixl
from kvtransfer.puller import KVPuller
from kvtransfer.transport import KVReceiver, PullFinished, ReceiverEffect


@unwind_on_stop()
def run(command: DecodeCommand, channel: SupervisorChannel | None) -> int:
    """Serve until stopped; return the exit code. Raises: ConfigError, ModelError, GroupFailed."""
    set_up_logging(command.worker.name or "decode", command.log.log_level, command.log.log_format)
    if command.transfer.kv_transport == "nixl":
        check_nixl()
    if command.rank.rank_fd >= 0:
        return run_rank(Role.DECODE, command, lambda _: None, lambda *args: _rank_receiver(command, *args))
    with load_engine(Role.DECODE, command, channel, lambda _: None) as engine:
        return _serve(command, engine, channel)


def _serve(command: DecodeCommand, engine: Engine, channel: SupervisorChannel | None) -> int:
    options = command.worker
    inbox: SimpleQueue[LinkEvent | PullFinished | Stop] = SimpleQueue()
    receiver = _make_receiver(command, engine, inbox.put)
    host = advertised_host(options.bind, options.advertise_host, options.gateway)
    links = Links(engine.peer, options.bind, host, lambda _: loop.current_status(), inbox.put)
    blocks = BlockManager(engine.num_blocks, engine.layout.block_size)
    loop: WorkerLoop[PullFinished, ReceiverEffect] = WorkerLoop(
        DecodeService(
            engine.identity(links.address), blocks, DecodeScheduler(blocks, max_num_seqs=command.decode.max_num_seqs)
        ),
        engine.runner,
        inbox=inbox,
        send=links.send,
        apply_transfer=receiver.apply,
        extra_counters=lambda: {**links.counters(), **receiver.counters(), **engine.runner.counters()},
        is_healthy=lambda: links.is_alive and receiver.is_alive and engine.is_alive,
        watch=watch_gateways(options.gateway),
        drain_timeout_s=options.drain_timeout,
        step_expected_s=engine.warm_up_s,
        on_tick=engine.on_tick,
        itl_target_s=command.pacing.itl_target / 1000,
    )
    run_until_stopped(loop, links, inbox, engine, options, channel)
    receiver.close()
    return 0


def _make_receiver(command: DecodeCommand, engine: Engine, deliver: Callable[[PullFinished], None]) -> KVReceiver:
    """For all ranks."""

    def make_own(deliver: Callable[[PullFinished], None]) -> KVReceiver:
        return _puller(command, RankPart(engine.peer, engine.plan, engine.plan.shards[0], engine.own), deliver)

    if engine.group is None:
        return make_own(deliver)
    group = engine.group
    receiver = GroupReceiver(group.size, make_own, lambda effect: group.tell(Transfer(effect, False)), deliver)
    group.on_transfer_event = receiver.take_event
    return receiver


def _rank_receiver(command: DecodeCommand, part: RankPart, report: Callable[[TransferEvent], None]) -> RankSide:
    return RankSide(_puller(command, part, lambda event: report(TransferEvent(encode_for_rank(event)))))


def _puller(command: DecodeCommand, part: RankPart, deliver: Callable[[PullFinished], None]) -> KVPuller:
    transfer = command.transfer
    heads = part.shard.kv_heads
    return KVPuller(
        *(part.peer, part.own.cache.shard_memory(heads), part.plan.layout, deliver),
        *(transfer.kv_transport, transfer.pull_timeout),
    )
