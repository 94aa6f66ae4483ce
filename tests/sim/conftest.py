"""Worlds for stories that are told step by step."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from gateway.life import LifePolicy
from tests.sim.plan import Plan, WorkerPlan
from tests.sim.world import World, simulated

USUAL = LifePolicy(
    max_concurrent_requests=512,
    request_timeout_s=60,
    when_no_prefill="queue",
    no_worker_timeout_s=5,
    resume_timeout_s=10,
    max_attempts=3,
)

StartWorld = Callable[..., World]


@pytest.fixture
def start() -> Iterator[StartWorld]:
    """Builds a world of one gateway and these workers, in which all have met.

    log: takes the trace; policy: changes of the usual one
    """
    logging.disable(logging.CRITICAL)
    with ExitStack() as stack:

        def start_world(
            *workers: WorkerPlan, seed: int = 0, log: Callable[[str], None] | None = None, **policy: float
        ) -> World:
            plan = Plan(seed=seed, gateways=("g0",), workers=workers, arrivals=(), policy=replace(USUAL, **policy))
            world = stack.enter_context(simulated(lambda: World(plan, log)))
            (gateway,) = world.gateways
            world.run_until(lambda: len(gateway.requests.fleet.all()) == len(workers), 1.0)
            return world

        yield start_world
    logging.disable(logging.NOTSET)
