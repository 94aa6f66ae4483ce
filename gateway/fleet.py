"""Who is alive, from the statuses seen. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from common.ids import PeerId
from common.kv_layout import KVLayout
from common.wire import Role, WorkerStatus

WORKER_TIMEOUT_S = 2.0
"""A worker that is silent for this long is dead: four statuses missed."""


@dataclass(slots=True)
class Worker:
    """A live worker, and what this gateway sent to it since its last status.

    sent_tokens: of prefill requests.  sent_blocks, sent_sequences: of decode requests.
    """

    peer: PeerId
    status: WorkerStatus
    last_heard_s: float
    sent_tokens: int = 0
    sent_blocks: int = 0
    sent_sequences: int = 0

    @property
    def is_routable(self) -> bool:
        return not self.status.is_draining


class Fleet:
    """Membership of both pools.

    model_hash: workers that serve another model are refused, with a call of `on_refused(name, reason)`.
    Mutable state: one `Worker` per live peer.
    """

    def __init__(self, model_hash: str, on_refused: Callable[[str, str], None]) -> None:
        self._model_hash = model_hash
        self._on_refused = on_refused
        self._workers: dict[PeerId, Worker] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._workers

    def observe(self, peer: PeerId, status: WorkerStatus, now: float) -> None:
        """Take in a status. What was sent since the last one is part of it, or soon will be."""
        if status.layout.model_hash != self._model_hash:
            self._on_refused(status.name, f"model {status.layout.model_hash} != this gateway's {self._model_hash}")
            return
        self._workers[peer] = Worker(peer, status, now)

    def heard(self, peer: PeerId, now: float) -> None:
        """It said anything at all, so it is alive."""
        if worker := self._workers.get(peer):
            worker.last_heard_s = now

    def note_draining(self, peer: PeerId) -> None:
        """It said so before its status does: until then it would be asked, and refuse, again and again."""
        if worker := self._workers.get(peer):
            worker.status = replace(worker.status, is_draining=True)

    def remove(self, peer: PeerId) -> Worker | None:
        """It died, or messages between us were lost. It is back with its next status. None when unknown."""
        return self._workers.pop(peer, None)

    def pop_silent(self, now: float) -> list[Worker]:
        silent = [worker for worker in self._workers.values() if now - worker.last_heard_s > WORKER_TIMEOUT_S]
        for worker in silent:
            del self._workers[worker.peer]
        return silent

    def get(self, peer: PeerId) -> Worker | None:
        return self._workers.get(peer)

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def pool(self, role: Role) -> list[Worker]:
        """Live workers that take new requests."""
        return [w for w in self._workers.values() if w.status.role is role and w.is_routable]

    def matching(self, layout: KVLayout) -> list[Worker]:
        """Decode workers that can take blocks of this layout."""
        return [w for w in self.pool(Role.DECODE) if not w.status.layout.mismatches(layout)]

    def missing_pools(self) -> list[str]:
        return [role.value for role in Role if not self.pool(role)]

    def max_context(self, model_limit: int) -> int:
        """Tokens of the longest sequence that every live worker can hold, at most the model's limit."""
        return min([model_limit, *(w.status.max_context for w in self._workers.values())])
