"""Which worker gets a request. Pure: from the workers' last statuses plus what was sent since."""

from collections.abc import Sequence

from common.ids import PeerId
from gateway.fleet import Worker


def pick_prefill(workers: Sequence[Worker], num_tokens: int, preferred: PeerId | None) -> Worker | None:
    """The one with the fewest prompt tokens queued; the preferred one (it has the prefix cached) while it is alive.

    Counts `num_tokens` as sent to the one that it picks.
    """
    if not workers:
        return None
    by_preference = [worker for worker in workers if worker.peer == preferred]
    picked = by_preference[0] if by_preference else min(workers, key=_queued_tokens)
    picked.sent_tokens += num_tokens
    return picked


def pick_decode(workers: Sequence[Worker], num_blocks: int) -> Worker | None:
    """The one with the most free KV blocks left, among equals the one with the fewest sequences.

    Counts `num_blocks` and one sequence as sent to the one that it picks.
    """
    if not workers:
        return None
    picked = min(workers, key=lambda w: (-_free_blocks(w), _num_sequences(w), w.status.name))
    picked.sent_blocks += num_blocks
    picked.sent_sequences += 1
    return picked


def _queued_tokens(worker: Worker) -> tuple[int, str]:
    return (worker.status.num_waiting_tokens + worker.sent_tokens, worker.status.name)


def _free_blocks(worker: Worker) -> int:
    return worker.status.num_free_blocks - worker.sent_blocks


def _num_sequences(worker: Worker) -> int:
    return worker.status.num_waiting + worker.status.num_running + worker.sent_sequences
