"""Faults one by one, each told step by step. Seeds draw them in every combination; see test_seeds."""

from itertools import permutations

import pytest

from common.wire import Cancel, Control, DecodeRequest, Ended, PrefillDone, PrefillRequest, Role, Tokens
from gateway.life import Phase, Request
from tests.sim.conftest import StartWorld
from tests.sim.gateway import Client
from tests.sim.plan import Arrival
from tests.sim.stories import ask, assert_at_rest, assert_completed, counters, pool, pools
from tests.sim.world import World

DUPLICATED: tuple[type[Control], ...] = (PrefillRequest, PrefillDone, DecodeRequest, Tokens, Cancel, Ended)
LATE_S = 0.1
"""By which a message that was sent has been handled, and whatever ran beside it has ended."""


def request_of(world: World, client: Client) -> Request:
    (gateway,) = world.gateways
    return next(each for each in gateway.requests._requests.values() if each.request_id == client.request_id)


def test_a_prefill_worker_is_restarted_at_the_same_address_under_load(start: StartWorld) -> None:
    world = start(*pools(), max_attempts=100)
    clients: list[Client] = []
    for family in range(6):
        clients += [ask(world, num_prompt=40, max_tokens=15, family=family) for _ in range(2)]
        world.clock.run_for(0.15)
        world.kill(world.pool(Role.PREFILL)[0])
        world.start_again("prefill-0")
    world.run_until_ended(60)
    assert_completed(*clients)
    assert_at_rest(world)


def test_streams_go_on_when_both_decode_workers_are_gone_and_come_back(start: StartWorld) -> None:
    world = start(*pools(2))
    clients = [ask(world, num_prompt=20, max_tokens=40, family=family) for family in range(6)]
    world.run_until(lambda: all(client.token_ids for client in clients), 10)
    for worker in world.pool(Role.DECODE):
        world.kill(worker)
    world.clock.run_for(3.0)
    assert not any(client.is_ended for client in clients)
    world.start_again("decode-0")
    world.start_again("decode-1")
    world.run_until_ended(60)
    assert_completed(*clients)
    assert_at_rest(world)


WITHOUT = {Phase.QUEUED: Role.PREFILL, Phase.HANDOFF: Role.DECODE}
"""The pool that a request waits for."""


@pytest.mark.parametrize(
    ("phase", "is_resumed"),
    [
        *((phase, False) for phase in (Phase.QUEUED, Phase.PREFILL, Phase.HANDOFF, Phase.DECODE)),
        *((phase, True) for phase in (Phase.QUEUED, Phase.PREFILL, Phase.DECODE)),
    ],
)
def test_a_client_that_leaves_at_any_stage_of_life_leaves_nothing_behind(
    start: StartWorld, phase: Phase, is_resumed: bool
) -> None:
    """is_resumed: its decode worker died before."""
    world = start(*pool(Role.PREFILL, 2, num_blocks=200), *pool(Role.DECODE, 2, num_blocks=200))
    world.clock.run_for(0.5)  # all are connected
    (gateway,) = world.gateways
    client = ask(world, num_prompt=400, max_tokens=100)
    if is_resumed:
        world.run_until(lambda: len(client.token_ids) > 3, 10)
        world.kill(next(worker for worker in world.pool(Role.DECODE) if worker.blocks.num_owned))
    world.run_until(lambda: request_of(world, client).phase is Phase.PREFILL, 10)
    missing = [worker.name for worker in world.pool(WITHOUT[phase])] if phase in WITHOUT else []
    for name in missing:
        world.kill(world.processes[name])
    world.run_until(lambda: request_of(world, client).phase is phase, 10)
    gateway.leave(client)
    for name in missing:
        world.start_again(name)
    assert_at_rest(world)
    other = ask(world, num_prompt=100, max_tokens=10)
    world.run_until(lambda: other.is_ended, 20)
    assert_completed(other)


def test_a_prompt_of_3000_tokens_stops_within_one_step_when_its_client_leaves(start: StartWorld) -> None:
    world = start(*pool(Role.PREFILL, num_blocks=1000), *pool(Role.DECODE, num_blocks=1000))
    (gateway,) = world.gateways
    client = ask(world, num_prompt=3000, max_tokens=4)
    world.run_until(lambda: counters(world, Role.PREFILL)["steps"] >= 5, 10)
    gateway.leave(client)
    world.run_until(lambda: not world.pool(Role.PREFILL)[0].blocks.num_owned, 1.0)
    steps = counters(world, Role.PREFILL)["steps"]
    world.clock.run_for(10.0)
    assert counters(world, Role.PREFILL)["steps"] <= steps + 1
    assert counters(world, Role.PREFILL)["prompt_tokens_computed"] < 300
    assert_at_rest(world)


def test_every_type_of_message_may_come_twice(start: StartWorld) -> None:
    """With pools so small that sequences are preempted, and a client that leaves."""
    lines: list[str] = []
    world = start(*pool(Role.PREFILL, num_blocks=40), *pool(Role.DECODE, num_blocks=13), log=lines.append)
    for one, other in permutations(world.processes, 2):
        world.network.weather(one, other).repeats = 1.0
    clients = [ask(world, num_prompt=20, max_tokens=24, family=family) for family in range(6)]
    leaver = world.submit(Arrival(at_s=world.now, num_prompt=20, max_tokens=24, leaves_s=0.2))
    world.run_until_ended(60)
    assert_completed(*clients)
    assert leaver.has_left
    sent = "\n".join(line for line in lines if " > " in line)
    assert [kind.__name__ for kind in DUPLICATED if f" {kind.__name__}(" not in sent] == []
    assert_at_rest(world)


def test_streams_go_on_after_their_gateway_was_frozen_for_8_seconds(start: StartWorld) -> None:
    """Workers have dropped what it asked for by then."""
    world = start(*pools())
    clients = [ask(world, num_prompt=20, max_tokens=100, family=family) for family in range(4)]
    world.run_until(lambda: all(client.token_ids for client in clients), 10)
    (gateway,) = world.gateways
    world.freeze(gateway, 8.0)
    world.clock.run_for(7.5)
    assert not any(worker.blocks.num_owned for worker in world.workers)
    assert not any(client.is_ended for client in clients)
    world.run_until_ended(60)
    assert_completed(*clients)
    assert_at_rest(world)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_streams_go_on_when_a_rank_is_killed_inside_a_step(start: StartWorld, role: Role) -> None:
    """The step does not come to its end, and after a while the whole worker is gone."""
    world = start(*pools(2))
    clients = [ask(world, num_prompt=60, max_tokens=40, family=family) for family in range(6)]
    worker = world.pool(role)[0]
    world.run_until(lambda: worker.counters()["steps"] > 2, 10)
    worker.runner.hangs_s = 0.3
    world.run_until(lambda: not worker.is_alive, 10)
    world.run_until_ended(60)
    assert_completed(*clients)
    assert_at_rest(world)


@pytest.mark.parametrize("workers", [pools(2), pool(Role.BOTH, 2)], ids=["split", "aggregated"])
def test_a_poison_request_ends_and_those_that_were_with_it_go_on(start: StartWorld, workers: list) -> None:
    world = start(*workers, no_worker_timeout_s=60.0, resume_timeout_s=60.0)
    clients = [ask(world, num_prompt=20, max_tokens=60, family=family) for family in range(4)]
    world.run_until(lambda: all(client.token_ids for client in clients), 10)
    poison = world.submit(Arrival(at_s=world.now, num_prompt=10, max_tokens=10, family=4, is_poison=True))
    world.run_until_ended(60)
    assert poison.error is not None
    assert poison.error.code == "too_many_attempts"
    assert_completed(*clients)
    assert_at_rest(world)
