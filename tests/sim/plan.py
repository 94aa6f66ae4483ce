"""What a simulation does, as data: who is there, what clients ask for, and what goes wrong when."""

from dataclasses import dataclass

from common.wire import Role
from gateway.life import LifePolicy

PATIENT = LifePolicy(
    max_concurrent_requests=512,
    request_timeout_s=300,
    when_no_prefill="queue",
    no_worker_timeout_s=60,
    resume_timeout_s=60,
    max_attempts=1000,
)
"""However much goes wrong, no request is given up: so every stream must come to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """A worker's name and sizes, which its next incarnations have as well."""

    name: str
    role: Role
    num_blocks: int = 64
    max_batch_tokens: int = 16
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A client's request.

    prompt:      of this many tokens, which are the same as those of other prompts of its family
    leaves_s:    after its arrival; None: the client stays to the end
    pause_s:     between two reads of its stream
    is_poison:   it kills whoever runs it
    """

    at_s: float
    num_prompt: int
    max_tokens: int
    gateway: str = "g0"
    family: int = 0
    is_greedy: bool = True
    leaves_s: float | None = None
    pause_s: float = 0.0
    is_poison: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Happens at at_s, or at the on_event-th event of the service after that."""

    at_s: float
    on_event: int = 0
    service: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash(Fault):
    """The process ends; the next incarnation is there after back_s. None: it does not come back.

    silently: with its host, so that connections are not reset
    """

    back_s: float | None
    silently: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRank(Fault):
    """A rank of a worker fails: its next step hangs for so long, and then all ranks end. It is started again."""

    hangs_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze(Fault):
    for_s: float
    timers_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(Fault):
    """Its steps take so many times as long."""

    for_s: float
    slowness: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Fault):
    """It is told to stop. back_s: another one is there after; None: none."""

    back_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Fault):
    """A worker is added."""

    worker: WorkerPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Break(Fault):
    """All connections with the other service break once."""

    other: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(Fault):
    """Nothing comes through between two services, in both directions. resets: connections break at once."""

    other: str
    for_s: float
    resets: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm(Fault):
    """The weather from a service to another one; see `Weather`."""

    other: str
    for_s: float
    loss: float = 0.0
    repeats: float = 0.0
    garbles: float = 0.0
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuff(Fault):
    """The other service does not read what this one sends."""

    other: str
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All of it.

    seed:           of delays and of what is left to chance
    max_outbox:     messages that wait at a worker's link
    step_s:         length of a step
    """

    seed: int
    gateways: tuple[str, ...]
    workers: tuple[WorkerPlan, ...]
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...] = ()
    policy: LifePolicy = PATIENT
    lease_s: float = 5.0
    pull_timeout_s: float = 3.0
    drain_timeout_s: float = 10.0
    max_outbox: int = 1024
    step_s: float = 0.01
    num_heads: int = 1

    @property
    def is_calm(self) -> bool:
        """Whether nothing happens that could make an attempt fail, but for pools that are too small."""
        return not self.faults and not self.is_poisoned

    @property
    def is_poisoned(self) -> bool:
        return any(arrival.is_poison for arrival in self.arrivals)

    @property
    def is_patient(self) -> bool:
        """Whether every request must be completed, however long it takes."""
        return self.policy == PATIENT
