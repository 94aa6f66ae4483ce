"""Which worker gets a request. Pure: from the workers' last statuses plus what was sent since.

Statuses are up to half a second old, and every gateway sees the same ones. So among workers that are as good as equal
the choice is left to chance, the better one of two (Mitzenmacher, "The Power of Two Choices", 2001): several gateways
then do not all send to the same worker until its next status.
"""

from collections.abc import Callable, Sequence
from random import Random

from common.block_hashes import BlockHash, hash_blocks, num_shareable_blocks
from common.ids import PeerId
from gateway.fleet import Worker


def pick_prefill(
    workers: Sequence[Worker], token_ids: Sequence[int], preferred: PeerId | None, random: Random
) -> Worker:
    """The one with the least work before the prompt's end; the preferred one (it computed the prompt) while it lives.

    Work is prompt tokens queued, and those of this prompt that are probably not cached there. So a prefix counts as
    much as it saves and no more: where the queue is longer than the prefix, another worker computes it as well.
    Counts these tokens as sent to the one that it picks, and the prompt as cached there.

    workers: at least one
    """
    sizes = {worker.status.layout.block_size for worker in workers}
    hashes = {size: hash_blocks(token_ids, size) for size in sizes}
    own = {worker.peer: _num_uncached(worker, len(token_ids), hashes) for worker in workers}
    picked = next((worker for worker in workers if worker.peer == preferred), None) or _pick_least(
        workers, lambda worker: (_queued_tokens(worker) + own[worker.peer],), min(own.values()), random
    )
    picked.sent_tokens += own[picked.peer]
    picked.prefixes.add(hashes[picked.status.layout.block_size])
    return picked


def pick_decode(workers: Sequence[Worker], num_blocks: int, random: Random) -> Worker:
    """The one with the most free KV blocks left, among equals the one with the fewest sequences.

    Counts `num_blocks` and one sequence as sent to the one that it picks.

    workers: at least one
    """
    picked = _pick_least(workers, lambda worker: (-_free_blocks(worker), _num_sequences(worker)), num_blocks, random)
    picked.sent_blocks += num_blocks
    picked.sent_sequences += 1
    return picked


def _pick_least(
    workers: Sequence[Worker], load: Callable[[Worker], tuple[int, ...]], request_load: int, random: Random
) -> Worker:
    """The less loaded one of two at random, of those whose load is less than a request's above the least."""
    (least, *_) = min(map(load, workers))
    near = [worker for worker in workers if load(worker)[0] < least + request_load]
    return min(random.sample(near, min(2, len(near))), key=load)


def _num_uncached(worker: Worker, num_tokens: int, hashes: dict[int, list[BlockHash]]) -> int:
    """Tokens of a prompt that the worker would have to compute.

    hashes: of the prompt's full blocks, by block size
    """
    block_size = worker.status.layout.block_size
    shareable = hashes[block_size][: num_shareable_blocks(num_tokens, block_size)]
    return num_tokens - worker.prefixes.num_leading(shareable) * block_size


def _queued_tokens(worker: Worker) -> int:
    return worker.status.num_waiting_tokens + worker.sent_tokens


def _free_blocks(worker: Worker) -> int:
    return worker.status.num_free_blocks - worker.sent_blocks


def _num_sequences(worker: Worker) -> int:
    return worker.status.num_waiting + worker.status.num_running + worker.sent_sequences
