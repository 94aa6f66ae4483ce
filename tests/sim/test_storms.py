"""Streams under every kind of fault, alone and together, for many seeds: the same tokens, and nothing left behind."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest

from common.sampling import SamplingParams
from common.wire import Role
from gateway.life import LifePolicy
from tests.fakes import expected_tokens
from tests.sim.network import Faults
from tests.sim.ring import Client, World
from tests.sim.worker import GATEWAY, LEASE_S

PATIENT = LifePolicy(
    max_concurrent_requests=512,
    request_timeout_s=300,
    when_no_prefill="queue",
    no_worker_timeout_s=60,
    resume_timeout_s=60,
    max_attempts=1000,
)
"""However much goes wrong, no request is given up: so every stream must come to its end."""
STORM_S = 2.0
SETTLED_S = LEASE_S + 6.0
"""Every lease, and the memory of a gateway that was silent, has run out by then."""


def lose_messages(world: World) -> None:
    world.network.faults = Faults(loss=world.random.uniform(0.005, 0.05))


def fill_links(world: World) -> None:
    world.network.faults = Faults(full=world.random.uniform(0.01, 0.2))


def lose_messages_and_fill_links(world: World) -> None:
    world.network.faults = Faults(loss=world.random.uniform(0, 0.03), full=world.random.uniform(0, 0.1))


def restart_workers(world: World) -> None:
    for _ in range(world.random.randint(1, 4)):
        moment_s = world.random.uniform(0, STORM_S)
        world.clock.after(moment_s, lambda: world.restart(world.random.choice([*world.workers.values()])))


def drain_and_replace_workers(world: World) -> None:
    def drain() -> None:
        worker = world.random.choice([*world.workers.values()])
        worker.drain()
        world.start_worker(worker.role, worker.name, worker.blocks.num_blocks, worker.max_batch_tokens)

    for _ in range(2):
        world.clock.after(world.random.uniform(0, STORM_S), drain)


def freeze_the_gateway(world: World) -> None:
    """For less than workers wait, or for longer."""
    world.clock.after(world.random.uniform(0, 1), lambda: world.freeze(GATEWAY, world.random.choice([0.3, 2.5, 7])))


def freeze_a_worker(world: World) -> None:
    def freeze() -> None:
        world.freeze(world.random.choice([*world.workers]), world.random.choice([0.3, 2.5, 7]))

    world.clock.after(world.random.uniform(0, 1), freeze)


KINDS: tuple[Callable[[World], None], ...] = (
    lose_messages,
    fill_links,
    restart_workers,
    drain_and_replace_workers,
    freeze_the_gateway,
    freeze_a_worker,
)


@dataclass
class Stream:
    """A client that stays to the end, and what it must see."""

    client: Client
    expected: list[int]


SPLIT = (Role.PREFILL, Role.DECODE) * 2
AGGREGATED = (Role.BOTH,) * 2
MIXED = (*SPLIT, Role.BOTH)


def start(seed: int, num_blocks: int, roles: tuple[Role, ...]) -> World:
    world = World(seed, PATIENT)
    for index, role in enumerate(roles):
        world.start_worker(role, f"{role}-{index}", num_blocks=num_blocks)
    world.run_until(lambda: not world.requests.fleet.missing_pools(), 5.0)
    return world


def submit_some(world: World, num_requests: int) -> list[Stream]:
    """Requests that share prefixes; a third of the clients leave at some moment."""
    streams: list[Stream] = []
    for index in range(num_requests):
        random = Random(world.random.random())
        prompt = tuple((index % 3) * 100 + token for token in range(random.randint(1, 30)))
        sampling = SamplingParams(max_tokens=random.randint(1, 20), temperature=index % 2, seed=index)
        name = f"r{index}"
        client = world.submit(name, prompt, sampling)
        if index % 3 == 2:
            world.clock.after(random.uniform(0, STORM_S), lambda name=name: world.abort(name))
        else:
            streams.append(Stream(client, expected_tokens(prompt, sampling)))
        world.run_for(random.uniform(0, STORM_S / num_requests))
    return streams


def weather(world: World, kinds: list[Callable[[World], None]], num_requests: int) -> None:
    """Requests in a storm; it passes, and then everything must come to its end and to rest."""
    for kind in kinds:
        kind(world)
    streams = submit_some(world, num_requests)
    world.run_until(lambda: world.now > STORM_S + 1, STORM_S + 2)
    world.network.faults = Faults()
    world.run_until_ended()
    for stream in streams:
        assert stream.client.error is None
        assert stream.client.token_ids == stream.expected
    world.run_for(SETTLED_S)
    assert len(world.requests) == 0
    for worker in world.workers.values():
        worker.blocks.check()
        assert worker.blocks.num_owned == 0, f"{worker.peer} still owns blocks"
        assert worker.service.is_drained, f"{worker.peer} still has something to do or to say"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_streams_survive(kind: Callable[[World], None], seed: int) -> None:
    weather(start(seed, 40, SPLIT), [kind], num_requests=8)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_streams_survive_on_workers_that_do_both(kind: Callable[[World], None], seed: int) -> None:
    weather(start(seed, 40, AGGREGATED), [kind], num_requests=8)


@pytest.mark.parametrize("roles", [SPLIT, AGGREGATED, MIXED], ids=["split", "aggregated", "mixed"])
@pytest.mark.parametrize("seed", range(120))
def test_streams_survive_several_faults_at_once_in_tiny_pools(seed: int, roles: tuple[Role, ...]) -> None:
    """14 blocks of 4 tokens: the largest request needs 13, so whatever runs beside it preempts or waits."""
    world = start(seed, 14, roles)
    kinds = world.random.sample(KINDS[2:], k=world.random.randint(1, 3))
    weather(world, [lose_messages_and_fill_links, *kinds], num_requests=8)
