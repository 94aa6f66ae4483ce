"""Who is alive, from the statuses seen. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from common.hang import is_overdue
from common.ids import PeerId
from common.kv_layout import KVLayout
from common.peers import LivePeers
from common.wire import Role, WorkerStatus
from gateway.prefixes import SentPrefixes

WORKER_TIMEOUT_S = 2.0
"""A worker that is silent for this long is dead: four statuses missed."""
REMEMBERED_S = 600.0
"""What is wrong with a worker is told once, unless it was silent for this long."""
NO_MATCH = "KV-compatible decode"
"""Stands for a pool: of decode workers whose KV layout is that of a prefill worker."""


@dataclass(slots=True)
class Worker:
    """One incarnation of a worker while it lives, and what this gateway sent to it.

    sent_tokens: of prefill requests since its last status.  sent_blocks, sent_sequences: the same of decode requests.
    prefixes:    of prompts since it is known
    is_back:     it was lost, and has sent one status since, which may have been under way then
    """

    peer: PeerId
    status: WorkerStatus
    last_heard_s: float
    is_back: bool = False
    sent_tokens: int = 0
    sent_blocks: int = 0
    sent_sequences: int = 0
    prefixes: SentPrefixes = field(init=False)

    def __post_init__(self) -> None:
        self.prefixes = SentPrefixes(self.status.num_blocks)

    def take(self, status: WorkerStatus, now: float) -> None:
        """What was sent since the last status is part of this one, or soon will be."""
        self.status, self.last_heard_s, self.is_back = status, now, False
        self.sent_tokens = self.sent_blocks = self.sent_sequences = 0

    @property
    def is_routable(self) -> bool:
        return not (self.status.is_draining or is_overdue(self.status.step_running_s, self.status.step_expected_s))


class Fleet:
    """Membership of both pools, and workers that need none.

    model_hash: workers that serve another model are refused
    on_problem: gets name and problem of a worker that is refused, or comes when no KV can flow between it and others
    Mutable state: one `Worker` per live peer, and who was heard of, or lost, lately.
    """

    def __init__(self, model_hash: str, on_problem: Callable[[str, str], None]) -> None:
        self._model_hash = model_hash
        self._on_problem = on_problem
        self._workers: dict[PeerId, Worker] = {}
        self._known = LivePeers(REMEMBERED_S)
        self._lost = LivePeers(REMEMBERED_S)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._workers

    def observe(self, peer: PeerId, status: WorkerStatus, now: float) -> None:
        """Take in a status: with the first one a worker is there."""
        if peer not in self._known and (problem := self._problem(status)):
            self._on_problem(status.name, problem)
        self._known.heard(peer, now)
        if status.layout.model_hash != self._model_hash:
            return
        if worker := self._workers.get(peer):
            worker.take(status, now)
        else:
            self._workers[peer] = Worker(peer, status, now, is_back=peer in self._lost)

    def _problem(self, status: WorkerStatus) -> str:
        """Why it cannot work with this gateway, or with any worker that it would exchange KV with; empty if it can."""
        if status.layout.model_hash != self._model_hash:
            return f"it has another model, with hash {status.layout.model_hash} and not {self._model_hash}"
        if status.role is Role.BOTH:
            return ""
        other_role = Role.DECODE if status.role is Role.PREFILL else Role.PREFILL
        names: dict[str, list[str]] = {}
        for worker in self._routable(other_role):
            differences = ", ".join(status.layout.mismatches(worker.status.layout))
            names.setdefault(differences, []).append(worker.status.name)
        if not names or "" in names:
            return ""
        found = "; ".join(f"{differences} of {', '.join(of)}" for differences, of in names.items())
        return f"no {other_role} worker has its KV layout: {found}"

    def heard(self, peer: PeerId, now: float) -> None:
        """It said anything at all, so it is alive."""
        if worker := self._workers.get(peer):
            worker.last_heard_s = now

    def note_draining(self, peer: PeerId) -> None:
        """It said so before its status does: until then it would be asked, and refuse, again and again."""
        if worker := self._workers.get(peer):
            worker.status = replace(worker.status, is_draining=True)

    def remove(self, peer: PeerId, now: float) -> Worker | None:
        """It died, or messages between us were lost. It is back with its next status. None when unknown."""
        self._lost.heard(peer, now)
        return self._workers.pop(peer, None)

    def pop_silent(self, now: float) -> list[Worker]:
        silent = [worker for worker in self._workers.values() if now - worker.last_heard_s > WORKER_TIMEOUT_S]
        for worker in silent:
            del self._workers[worker.peer]
        self._known.pop_silent(now)
        self._lost.pop_silent(now)
        return silent

    def get(self, peer: PeerId) -> Worker | None:
        return self._workers.get(peer)

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def prompt_workers(self) -> list[Worker]:
        """Live workers that take prompts: those of prefill whose KV a decode worker can take, and those that do both.

        No others: a first token that nobody could follow up would be a broken promise.
        """
        prefill = [w for w in self._routable(Role.PREFILL) if self.matching(w.status.layout)]
        return prefill + self._routable(Role.BOTH)

    def goes_on(self, peer: PeerId) -> bool:
        """Whether this worker decodes what it computed itself."""
        worker = self._workers.get(peer)
        return worker is not None and worker.status.role is Role.BOTH

    def _routable(self, role: Role) -> list[Worker]:
        return [w for w in self._workers.values() if w.status.role is role and w.is_routable]

    def matching(self, layout: KVLayout) -> list[Worker]:
        """Decode workers that can take blocks of this layout."""
        return [w for w in self._routable(Role.DECODE) if w.status.layout == layout]

    def missing_pools(self) -> list[str]:
        """What is lacking to serve a request; empty when nothing is."""
        if self.prompt_workers():
            return []
        return [role.value for role in (Role.PREFILL, Role.DECODE) if not self._routable(role)] or [NO_MATCH]

    def max_context(self, model_limit: int) -> int:
        """Tokens of the longest sequence that every live worker can hold, at most the model's limit."""
        return min([model_limit, *(w.status.max_context for w in self._workers.values())])
