"""From a seed to a plan."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from common.wire import Role
from gateway.life import LifePolicy
from tests.sim.plan import (
    PATIENT,
    Arrival,
    Break,
    Crash,
    Drain,
    FailRank,
    Fault,
    Freeze,
    Join,
    Partition,
    Plan,
    Slow,
    Storm,
    Stuff,
    WorkerPlan,
)

BUSY_S = 1.0
"""In which clients come and things go wrong."""
SOON_S = 0.3
FIRST_S = 0.1
"""When the first client may come: most workers have joined by then."""
MAX_PROMPT = 30
MAX_TOKENS = 20
SHAPES = ("gpd", "gpd", "gpdd", "gppd", "gppdd", "ggpdd", "ggpd", "gb", "gbb", "ggbb", "gpdb", "gpdbb")
"""Services of a plan by first letters: gateways, and workers that prefill, decode or do both."""
POISONED = replace(PATIENT, max_attempts=3)
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
NUM_BLOCKS = (14, 14, 14, 20, 40)
"""Of 4 tokens: the longest request needs 13, and a block is left free for the others."""
MAX_ARRIVALS = 8
NUM_ARRIVALS = (1, 2, 3, 4, 6, MAX_ARRIVALS, MAX_ARRIVALS, MAX_ARRIVALS)
NUM_FAULTS = (0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 6)


def draw_plan(seed: int) -> Plan:
    """An ordinary one, now and then with a request that kills, or with a queue so long that leases run out."""
    random = Random(seed)
    kind = random.random()
    plan = draw_ordinary(random, seed)
    if kind < 0.04:
        return poisoned(random, plan)
    return crowded(random, plan) if kind < 0.09 else plan


def draw_ordinary(random: Random, seed: int) -> Plan:
    shape = random.choice(SHAPES)
    gateways = tuple(f"g{index}" for index in range(shape.count("g")))
    num_heads = 2 if random.random() < 0.25 else 1
    num_blocks = random.choice(NUM_BLOCKS)
    workers = tuple(
        draw_worker(random, f"{letter}{index}", ROLES[letter], num_blocks, num_heads)
        for index, letter in enumerate(shape.replace("g", ""))
    )
    width_s = random.choice((0.02, 0.3, BUSY_S))
    arrivals = tuple(draw_arrival(random, gateways, width_s) for _ in range(random.choice(NUM_ARRIVALS)))
    names = [*gateways, *(worker.name for worker in workers)]
    faults = tuple(random.choice(KINDS)(random, names, workers) for _ in range(random.choice(NUM_FAULTS)))
    return Plan(
        seed=seed,
        gateways=gateways,
        workers=workers,
        arrivals=arrivals,
        faults=faults,
        policy=draw_policy(random),
        lease_s=random.choice((1.5, 5.0)),
        pull_timeout_s=random.choice((1.0, 3.0)),
        drain_timeout_s=random.choice((0.5, 10.0)),
        max_outbox=random.choice((2, 5, 1024)),
        num_heads=num_heads,
        step_s=random.choice((0.01, 0.01, 0.03, 0.1)),
    )


def poisoned(random: Random, plan: Plan) -> Plan:
    """Nothing else goes wrong, and workers come back."""
    poison = replace(random.choice(plan.arrivals), is_poison=True, leaves_s=None)
    return replace(plan, arrivals=(*plan.arrivals[: MAX_ARRIVALS - 1], poison), faults=(), policy=POISONED)


def crowded(random: Random, plan: Plan) -> Plan:
    """Long streams all at once, for one decode worker that has room for few of them."""
    prefill, decode = (
        draw_worker(random, name, role, 40 if role is Role.PREFILL else 14, plan.num_heads)
        for name, role in (("p0", Role.PREFILL), ("d1", Role.DECODE))
    )
    arrivals = tuple(
        replace(draw_arrival(random, plan.gateways, 0.1), max_tokens=random.randint(10, MAX_TOKENS))
        for _ in range(MAX_ARRIVALS)
    )
    faults = tuple(map(_comes_back, plan.faults)) if random.random() < 0.5 else ()
    return replace(plan, workers=(prefill, decode), arrivals=arrivals, faults=faults, lease_s=1.5, step_s=0.05)


def _comes_back(fault: Fault) -> Fault:
    """There is nobody else who could do what its service does."""
    return replace(fault, back_s=0.0) if isinstance(fault, Crash | Drain) and fault.back_s is None else fault


def draw_worker(random: Random, name: str, role: Role, num_blocks: int, num_heads: int) -> WorkerPlan:
    num_ranks = random.randint(1, num_heads) if role is not Role.BOTH else 1
    return WorkerPlan(
        name=name,
        role=role,
        num_blocks=num_blocks,
        max_batch_tokens=random.choice((5, 16, 16, 64)),
        num_ranks=num_ranks,
    )


def draw_arrival(random: Random, gateways: tuple[str, ...], width_s: float, *, is_poison: bool = False) -> Arrival:
    max_tokens = random.choice((1, random.randint(2, 6), *(random.randint(10, MAX_TOKENS) for _ in range(2))))
    return Arrival(
        at_s=round(random.uniform(FIRST_S, FIRST_S + width_s), 3),
        num_prompt=random.randint(1, MAX_PROMPT),
        max_tokens=max_tokens,
        gateway=random.choice(gateways),
        family=random.randrange(3),
        is_greedy=random.random() < 0.5,
        leaves_s=round(random.uniform(0, 0.5), 3) if random.random() < 0.2 else None,
        pause_s=random.choice((0.02, 0.2)) if random.random() < 0.15 else 0.0,
    )


def draw_policy(random: Random) -> LifePolicy:
    if random.random() < 0.75:
        return PATIENT
    return LifePolicy(
        max_concurrent_requests=random.choice((4, 512)),
        request_timeout_s=random.choice((1.0, 3.0, 10.0)),
        when_no_prefill=random.choice(("queue", "reject")),
        no_worker_timeout_s=random.choice((0.5, 3.0)),
        resume_timeout_s=random.choice((0.5, 3.0)),
        max_attempts=random.choice((1, 3)),
    )


Kind = Callable[[Random, list[str], tuple[WorkerPlan, ...]], Fault]


def _moment(random: Random) -> float:
    return round(random.uniform(FIRST_S, FIRST_S + random.choice((SOON_S, BUSY_S))), 3)


def _event(random: Random) -> int:
    return random.choice((0, random.randint(1, 30)))


def _worker(random: Random, workers: tuple[WorkerPlan, ...]) -> str:
    return random.choice(workers).name


def _pair(random: Random, names: list[str]) -> tuple[str, str]:
    one, other = random.sample(names, 2)
    return one, other


def _may_stay_away(name: str, workers: tuple[WorkerPlan, ...]) -> bool:
    """A gateway, and the first of two workers of a pool: the other one is left in any case."""
    roles = {worker.name: worker.role for worker in workers}
    if name not in roles:
        return True
    of_pool = [worker.name for worker in workers if worker.role is roles[name]]
    return len(of_pool) > 1 and of_pool[0] == name


def crash(random: Random, names: list[str], workers: tuple[WorkerPlan, ...]) -> Fault:
    name = random.choice(names)
    return Crash(
        at_s=_moment(random),
        on_event=_event(random),
        service=name,
        back_s=random.choice((0.0, round(random.uniform(0, 3), 3), None if _may_stay_away(name, workers) else 0.0)),
        silently=random.random() < 0.3,
    )


def fail_rank(random: Random, names: list[str], workers: tuple[WorkerPlan, ...]) -> Fault:
    hangs_s = round(random.uniform(0.01, 2), 3)
    return FailRank(at_s=_moment(random), service=_worker(random, workers), hangs_s=hangs_s)


def freeze(random: Random, names: list[str], workers: tuple[WorkerPlan, ...]) -> Fault:
    return Freeze(
        at_s=_moment(random),
        on_event=_event(random),
        service=random.choice(names),
        for_s=random.choice((0.3, 2.5, 8.0)),
        timers_first=random.random() < 0.5,
    )


def freeze_a_gateway(random: Random, names: list[str], workers: tuple[WorkerPlan, ...]) -> Fault:
    return Freeze(
        at_s=_moment(random),
        on_event=_event(random),
        service=random.choice([name for name in names if name.startswith("g")]),
        for_s=random.choice((2.5, 8.0)),
        timers_first=random.random() < 0.5,
    )


def slow(random: Random, names: list[str], workers: tuple[WorkerPlan, ...]) -> Fault:
    slowness = random.choice((5.0, 30.0, 100.0))
    return Slow(
        at_s=_moment(random), service=_worker(random, workers), for_s=random.choice((1.0, 3.0)), slowness=slowness
    )


def drain(random: Random, names: list[str], workers: tuple[WorkerPlan, ...]) -> Fault:
    name = random.choice(names)
    back_s = random.choice((0.0, round(random.uniform(0, 1), 3), None if _may_stay_away(name, workers) else 0.0))
    return Drain(at_s=_moment(random), on_event=_event(random), service=name, back_s=back_s)


def join(random: Random, names: list[str], workers: tuple[WorkerPlan, ...]) -> Fault:
    like = random.choice(workers)
    worker = WorkerPlan(
        name=f"n{random.randrange(3)}",
        role=like.role,
        num_blocks=like.num_blocks,
        max_batch_tokens=like.max_batch_tokens,
        num_ranks=like.num_ranks,
    )
    return Join(at_s=_moment(random), service=names[0], worker=worker)


def break_connections(random: Random, names: list[str], workers: tuple[WorkerPlan, ...]) -> Fault:
    one, other = _pair(random, names)
    return Break(at_s=_moment(random), on_event=_event(random), service=one, other=other)


def part(random: Random, names: list[str], workers: tuple[WorkerPlan, ...]) -> Fault:
    one, other = _pair(random, names)
    return Partition(
        at_s=_moment(random),
        on_event=_event(random),
        service=one,
        other=other,
        for_s=random.choice((0.5, 3.0, 7.0)),
        resets=random.random() < 0.5,
    )


def storm(random: Random, names: list[str], workers: tuple[WorkerPlan, ...]) -> Fault:
    one, other = _pair(random, names)
    return Storm(
        at_s=_moment(random),
        service=one,
        other=other,
        for_s=random.choice((0.5, 2.0)),
        loss=random.choice((0.0, 0.05, 0.3)),
        repeats=random.choice((0.0, 0.2)),
        garbles=random.choice((0.0, 0.3)),
        delay_s=random.choice((0.0, 0.1, 0.5)),
    )


def stuff(random: Random, names: list[str], workers: tuple[WorkerPlan, ...]) -> Fault:
    one, other = _pair(random, names)
    return Stuff(at_s=_moment(random), service=one, other=other, for_s=random.choice((0.3, 1.5, 4.0)))


KINDS: tuple[Kind, ...] = (
    crash,
    crash,
    fail_rank,
    freeze,
    freeze_a_gateway,
    slow,
    drain,
    drain,
    join,
    break_connections,
    break_connections,
    part,
    part,
    storm,
    storm,
    stuff,
    stuff,
)
