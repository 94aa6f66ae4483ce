"""Both sides of the KV transfer of a simulated worker: real servers and pullers, one a rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from common.ids import PeerId
from common.kv_source import KVSource
from common.shard_memory import ShardMemory
from kvtransfer.group import GroupReceiver, GroupSender, RankSide, decode_shard, encode_for_rank
from kvtransfer.puller import KVPuller
from kvtransfer.server import KVServer
from kvtransfer.transport import KVReceiver, KVReleased, PullFinished

if TYPE_CHECKING:
    from tests.sim.cache import Cache
    from tests.sim.worker import Worker

LOG_DELAY_S = 0.005
LATE_S = 0.2
"""Now and then, for a rank whose core somebody else has."""


class RankLog:
    """What rank 0 tells another rank, which hears it a little later. Mutable state: what it has not heard yet."""

    def __init__(self, worker: Worker, rank: RankSide) -> None:
        self._worker = worker
        self._rank = rank
        self._entries: deque[bytes] = deque()

    def tell(self, entry: bytes) -> None:
        self._entries.append(entry)
        self._worker.after(_draw_delay_s(self._worker.world.random), self._replay_one)

    def replay(self) -> None:
        """All of it: rank 0 waits for that."""
        while self._entries:
            self._replay_one()

    def _replay_one(self) -> None:
        if self._entries:
            self._rank.apply(self._entries.popleft())


def _draw_delay_s(random: Random) -> float:
    return random.uniform(0, LATE_S if random.random() < 0.1 else LOG_DELAY_S)


def make_sender(worker: Worker, deliver: Callable[[KVReleased], None]) -> tuple[Callable[[Any], None], KVSource]:
    cache = worker.cache

    def server(rank: int, deliver: Callable[[KVReleased], None]) -> KVServer:
        address = f"tcp://{worker.name}:{2 + rank}"
        peer = worker.peer if rank == 0 else PeerId(f"{worker.peer}/{rank}")
        return KVServer(peer, _shard(cache, cache.memory[rank], rank), deliver, address)

    own = server(0, deliver)
    others = [server(rank, _never_released) for rank in range(1, cache.num_ranks)]
    ranks = [RankSide(each, each.shard) for each in others]
    shards = own.shard, *(decode_shard(rank.shard) for rank in ranks)
    source = KVSource(peer=worker.peer, layout=cache.layout, num_blocks=worker.plan.num_blocks, shards=shards)
    if not others:
        return own.apply, source
    logs = [RankLog(worker, rank) for rank in ranks]
    worker.runner.before_step = lambda: _replay(logs)

    def publish(effect: bytes) -> None:
        _tell(logs, effect)
        _replay(logs)

    return GroupSender(own, publish, lambda effect: _tell(logs, effect)).apply, source


def _shard(cache: Cache, memory: memoryview, rank: int) -> ShardMemory:
    heads = range(rank * cache.rank_heads, (rank + 1) * cache.rank_heads)
    return ShardMemory(memory, heads, cache.layout.head_bytes)


def _tell(logs: list[RankLog], effect: bytes) -> None:
    for log in logs:
        log.tell(effect)


def _replay(logs: list[RankLog]) -> None:
    for log in logs:
        log.replay()


def make_receiver(
    worker: Worker, deliver: Callable[[PullFinished], None], pull_timeout_s: float
) -> Callable[[Any], None]:
    cache = worker.cache

    def puller(rank: int, deliver: Callable[[PullFinished], None]) -> KVPuller:
        memory: Any = cache.pulled(rank)
        return KVPuller(worker.peer, _shard(cache, memory, rank), cache.layout, deliver, "tcp", pull_timeout_s)

    if cache.num_ranks == 1:
        return puller(0, deliver).apply
    logs: list[RankLog] = []

    def make_own(deliver: Callable[[PullFinished], None]) -> KVReceiver:
        return puller(0, deliver)

    group = GroupReceiver(cache.num_ranks, make_own, lambda effect: _tell(logs, effect), deliver)

    def report(event: PullFinished) -> None:
        data = encode_for_rank(event)
        worker.after(_draw_delay_s(worker.world.random), lambda: group.take_event(data))

    logs += [RankLog(worker, RankSide(puller(rank, report))) for rank in range(1, cache.num_ranks)]
    worker.runner.before_step = lambda: _replay(logs)
    return group.apply


def _never_released(event: KVReleased) -> None:
    raise AssertionError(f"{event.key} was released at another rank than rank 0")
