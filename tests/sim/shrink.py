"""Makes a plan that fails smaller, for as long as it fails: delta debugging over what happens in it.

Source: Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input" (2002), section 3.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from common.wire import Role
from tests.sim.plan import Arrival, Fault, Plan, WorkerPlan
from tests.sim.scenario import Violation

Item = TypeVar("Item")
OTHER_SEEDS = 8
"""Tried with a smaller plan: it has other delays by chance, and may fail with them as well."""
Why = Callable[[Plan], Violation | None]


def shrink(plan: Plan, why: Why) -> Plan:
    """A smaller plan that fails in the same way. why: does it fail? None: it does not."""
    violation = why(plan)
    assert violation is not None, "only a plan that fails can be shrunk"

    def smallest(candidates: Iterable[Plan]) -> Plan | None:
        """The first of these that fails, with its delays or with others."""
        for candidate in filter(is_servable, candidates):
            for seed in (candidate.seed, *range(OTHER_SEEDS)):
                attempt = replace(candidate, seed=seed)
                if (other := why(attempt)) and other.kind == violation.kind:
                    return attempt
        return None

    plan = smallest([_before(plan, violation.at_s)]) or plan
    while smaller := smallest(_smaller(plan)):
        plan = smaller
    return plan


def is_servable(plan: Plan) -> bool:
    """Whether there are workers, at first, for what clients want."""
    roles = {worker.role for worker in plan.workers}
    return Role.BOTH in roles or {Role.PREFILL, Role.DECODE} <= roles


def _before(plan: Plan, end_s: float) -> Plan:
    """What happens after the failure is not its cause."""
    return replace(
        plan,
        arrivals=tuple(arrival for arrival in plan.arrivals if arrival.at_s <= end_s),
        faults=tuple(fault for fault in plan.faults if fault.at_s <= end_s),
    )


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Simpler plans, those with less in them first."""
    for faults in _parts(plan.faults):
        yield replace(plan, faults=faults)
    for arrivals in _parts(plan.arrivals):
        if arrivals:
            yield replace(plan, arrivals=arrivals)
    for workers in _parts(plan.workers):
        if workers:
            yield replace(plan, workers=workers)
    for gateways in _parts(plan.gateways):
        if gateways:
            yield replace(plan, gateways=gateways)
    for index, arrival in enumerate(plan.arrivals):
        for simpler in _simpler_arrivals(arrival):
            yield replace(plan, arrivals=_with(plan.arrivals, index, simpler))
    for index, fault in enumerate(plan.faults):
        if fault.on_event:
            yield replace(plan, faults=_with(plan.faults, index, replace(fault, on_event=0)))
    for index, worker in enumerate(plan.workers):
        if worker.num_ranks > 1:
            yield replace(plan, workers=_with(plan.workers, index, replace(worker, num_ranks=1)))
    if plan.num_heads > 1 and all(worker.num_ranks == 1 for worker in plan.workers):
        yield replace(plan, num_heads=1)


def _parts(items: Sequence[Item]) -> Iterator[tuple[Item, ...]]:
    """Without ever smaller pieces."""
    size = len(items)
    while size:
        for start in range(0, len(items), size):
            yield (*items[:start], *items[start + size :])
        size //= 2


def _with(items: Sequence[Item], index: int, item: Item) -> tuple[Item, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _simpler_arrivals(arrival: Arrival) -> Iterator[Arrival]:
    if arrival.pause_s:
        yield replace(arrival, pause_s=0.0)
    if arrival.leaves_s is not None:
        yield replace(arrival, leaves_s=None)
    if not arrival.is_greedy:
        yield replace(arrival, is_greedy=True)
    for divisor in (2, 1.25):
        if arrival.max_tokens > 1:
            yield replace(arrival, max_tokens=int(arrival.max_tokens / divisor))
        if arrival.num_prompt > 1:
            yield replace(arrival, num_prompt=int(arrival.num_prompt / divisor))


def describe(plan: Plan) -> str:
    """As a literal, a field a line; what is as ever is left out."""
    lines = [f"    seed={plan.seed},", f"    gateways={plan.gateways!r},"]
    for name, items in (("workers", plan.workers), ("arrivals", plan.arrivals), ("faults", plan.faults)):
        lines += [f"    {name}=(", *(f"        {_literal(item)}," for item in items), "    ),"]
    usual = Plan(seed=0, gateways=(), workers=(), arrivals=())
    for name in ("policy", "lease_s", "pull_timeout_s", "drain_timeout_s", "max_outbox", "step_s", "num_heads"):
        if getattr(plan, name) != getattr(usual, name):
            lines.append(f"    {name}={getattr(plan, name)!r},")
    return "\n".join(["Plan(", *lines, ")"])


def _literal(item: Arrival | Fault | WorkerPlan) -> str:
    """Without fields that have their defaults; enums by name."""
    fields = type(item).__dataclass_fields__
    values = {name: getattr(item, name) for name, field in fields.items() if getattr(item, name) != field.default}
    texts = {
        n: f"Role.{v.name}" if n == "role" else _literal(v) if n == "worker" else repr(v) for n, v in values.items()
    }
    return f"{type(item).__name__}({', '.join(f'{name}={text}' for name, text in texts.items())})"
