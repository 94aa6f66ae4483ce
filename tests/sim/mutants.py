"""Bugs planted one at a time, to see that the simulation finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from common.engine.block_manager import BlockManager
from common.engine.worker import Gateways
from common.ids import BlockId, SequenceKey
from common.link_numbers import Arrival, LinkNumbers
from common.service import LinkLost
from decode.scheduler import DecodeScheduler, DecodeSequence
from decode.service import DecodeService
from gateway.engine import EngineGeneration
from gateway.life import LifePolicy, Request
from gateway.requests import Requests
from kvtransfer.group import GroupSender, encode_for_rank
from kvtransfer.source_channel import SourceChannel
from kvtransfer.transport import Publish, Withdraw
from prefill.scheduler import Candidate, PrefillScheduler
from prefill.service import PrefillService


class Mutant(NamedTuple):
    """A method that is replaced by another function. found_by: a seed that fails then."""

    cls: type
    name: str
    function: Callable[..., Any]
    found_by: int


def drop_a_release(scheduler: PrefillScheduler, key: SequenceKey) -> bool:
    return scheduler._handoffs.pop(key, None) is not None


def take_any_attempt(requests: Requests, peer: Any, message: Any) -> Request | None:
    request = requests._requests.get(message.request_id)
    return request if request and request.is_at(peer) else None


def forget_a_cancel(service: PrefillService, key: SequenceKey) -> list[Any]:
    service._gateways.cancelled(key)
    return []


def reuse_blocks_early(scheduler: DecodeScheduler, key: SequenceKey) -> bool:
    """Those of a pull that is under way, once nobody wants them."""
    if sequence := scheduler._pulling.get(key):
        scheduler._blocks.release(sequence.block_table)
        sequence.block_table = []
        is_first = not sequence.is_cancelled
        sequence.is_cancelled = True
        return is_first
    for queue in (scheduler._waiting, scheduler._running):
        if sequence := queue.pop(key, None):
            scheduler._blocks.release(sequence.block_table)
    return False


def ignore_a_lost_link(requests: Requests, event: Any, now: float) -> list[Any]:
    return [] if isinstance(event, LinkLost) else HANDLE(requests, event, now)


HANDLE = Requests.handle


async def emit_tokens_twice(generation: EngineGeneration) -> Any:
    update = await NEXT_UPDATE(generation)
    if update.finish is None and generation._pending is None and len(update.token_ids) > 1:
        generation._pending = update
    return update


NEXT_UPDATE = EngineGeneration.__anext__


def renew_no_lease(requests: Requests, peer: Any) -> tuple[Any, ...]:
    return ()


def preempt_the_oldest(scheduler: DecodeScheduler) -> Any:
    """By taking the order of age for its reverse."""
    with patch.object(DecodeSequence, "age_order", property(lambda sequence: (-sequence.arrival_s, sequence.key))):
        return SCHEDULE(scheduler)


SCHEDULE = DecodeScheduler.schedule


def drain_and_accept(service: PrefillService) -> list[Any]:
    effects = DRAIN(service)
    service._is_draining = False
    return effects


DRAIN = PrefillService.drain


def share_blocks_before_they_are_computed(scheduler: PrefillScheduler, starting: Sequence[Candidate]) -> None:
    START(scheduler, starting)
    for sequence in (candidate.sequence for candidate in starting):
        for block_id, block_hash in zip(sequence.block_table, sequence.hashes, strict=False):
            scheduler._blocks.seal(block_id, block_hash, (0,))


START = PrefillScheduler._start


def publish_before_ranks_know(sender: GroupSender, effect: Any) -> None:
    sender._own.apply(effect)
    match effect:
        case Publish() | Withdraw():
            sender._log_withdraw(encode_for_rank(effect))


def see_no_gap(numbers: LinkNumbers, seq: int) -> Arrival:
    if seq <= numbers.last_received:
        return Arrival.DUPLICATE
    numbers.last_received = seq
    return Arrival.NEXT


def withdraw_nothing(service: PrefillService, now: float) -> list[Any]:
    """Handoffs whose lease ran out."""
    return [effect for effect in TICK(service, now) if not isinstance(effect, Withdraw)]


TICK = PrefillService._tick


def take_late_answers(channel: SourceChannel, pull: Any) -> None:
    channel.pulls.remove(pull)


def keep_the_attempt(request: Request, now: float) -> None:
    attempt = request.attempt
    NEXT_ATTEMPT(request, now)
    request.attempt = attempt


NEXT_ATTEMPT = Request.begin_next_attempt


def never_time_out(policy: LifePolicy, request: Request, missing_pools: list[str], now: float) -> None:
    return None


def try_nobody_alone(policy: LifePolicy, request: Request) -> bool:
    return False


def overtake_in_the_queue(scheduler: DecodeScheduler) -> list[DecodeSequence]:
    """Whoever fits goes first."""
    admitted: list[DecodeSequence] = []
    for sequence in [*scheduler._waiting.values()]:
        if scheduler._reserve(sequence):
            del scheduler._waiting[sequence.key]
            scheduler._pulling[sequence.key] = sequence
            admitted.append(sequence)
    return admitted


def evict_a_shared_block(blocks: BlockManager, block_ids: Any) -> None:
    """By taking no reference to what is cached."""
    for block_id in block_ids:
        if block_id not in blocks._cached:
            blocks._refs[block_id] += 1


def lose_unsent_tokens(service: DecodeService, peer: Any, message: Any) -> None:
    """Of a gateway that does not read."""


def lose_unsent_messages(gateways: Gateways, peer: Any, message: Any) -> None:
    """For a gateway that does not read."""


def seal_another_content(scheduler: DecodeScheduler, sequence: DecodeSequence) -> None:
    for index in range(sequence.num_shared, len(sequence.hashes)):
        first = sequence.block_table[sequence.num_shared]
        scheduler._blocks.seal(BlockId(first), sequence.hashes[index], sequence.pulled_kv.checksums[index])


MUTANTS: dict[str, Mutant] = {
    "drop a release": Mutant(PrefillScheduler, "release", drop_a_release, 0),
    "take any attempt": Mutant(Requests, "_current", take_any_attempt, 4),
    "forget a cancel": Mutant(PrefillService, "_cancel", forget_a_cancel, 111),
    "reuse blocks early": Mutant(DecodeScheduler, "cancel", reuse_blocks_early, 76),
    "ignore a lost link": Mutant(Requests, "handle", ignore_a_lost_link, 8),
    "emit tokens twice": Mutant(EngineGeneration, "__anext__", emit_tokens_twice, 16),
    "renew no lease": Mutant(Requests, "leases", renew_no_lease, 32),
    "preempt the oldest": Mutant(DecodeScheduler, "schedule", preempt_the_oldest, 1),
    "drain and accept": Mutant(PrefillService, "drain", drain_and_accept, 92),
    "share blocks before they are computed": Mutant(
        PrefillScheduler, "_start", share_blocks_before_they_are_computed, 1
    ),
    "publish before ranks know": Mutant(GroupSender, "apply", publish_before_ranks_know, 179),
    "see no gap": Mutant(LinkNumbers, "take_message", see_no_gap, 1556),
    "withdraw nothing": Mutant(PrefillService, "_tick", withdraw_nothing, 41),
    "take late answers": Mutant(SourceChannel, "forget", take_late_answers, 240),
    "keep the attempt": Mutant(Request, "begin_next_attempt", keep_the_attempt, 7),
    "never time out": Mutant(LifePolicy, "overdue", never_time_out, 18),
    "try nobody alone": Mutant(LifePolicy, "is_on_trial", try_nobody_alone, 31),
    "overtake in the queue": Mutant(DecodeScheduler, "admit", overtake_in_the_queue, 1),
    "evict a shared block": Mutant(BlockManager, "share", evict_a_shared_block, 4),
    "lose unsent tokens": Mutant(DecodeService, "_keep", lose_unsent_tokens, 62),
    "lose unsent messages": Mutant(Gateways, "keep_unsent", lose_unsent_messages, 1),
    "seal another content": Mutant(DecodeScheduler, "_seal", seal_another_content, 1),
}
"""What is done wrong, and where."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    mutant = MUTANTS[name]
    with patch.object(mutant.cls, mutant.name, mutant.function):
        yield
