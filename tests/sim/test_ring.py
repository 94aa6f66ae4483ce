"""The path of a request through real services: undisturbed, and with workers that die on the way."""

from random import Random

import pytest

from common.sampling import FinishReason
from common.wire import Role
from tests.sim.conftest import StartWorld
from tests.sim.plan import WorkerPlan
from tests.sim.stories import ask, ask_some, assert_at_rest, assert_completed, counters, pool, pools


def test_tokens_come_through_both_pools_in_order(start: StartWorld) -> None:
    world = start(*pools())
    client = ask(world, num_prompt=37, max_tokens=20)
    world.run_until_ended(10)
    assert_completed(client)
    assert client.finish is not None
    assert client.finish.reason is FinishReason.LENGTH
    prefill, decode = counters(world, Role.PREFILL), counters(world, Role.DECODE)
    assert (prefill["prompt_tokens_computed"], decode["prompt_tokens_computed"]) == (37, 0)
    assert (prefill["first_tokens_sampled"], prefill["later_tokens_sampled"]) == (1, 0)
    assert (decode["first_tokens_sampled"], decode["later_tokens_sampled"]) == (0, 19)
    assert_at_rest(world)


def test_a_request_of_one_token_never_reaches_decode(start: StartWorld) -> None:
    world = start(*pools())
    client = ask(world, num_prompt=9, max_tokens=1)
    world.run_until_ended(10)
    assert len(client.token_ids) == 1
    assert counters(world, Role.DECODE)["steps"] == 0
    assert_at_rest(world)


def test_a_prompt_given_twice_is_cached_the_second_time(start: StartWorld) -> None:
    world = start(*pools())
    first = ask(world, num_prompt=33, max_tokens=5)
    world.run_until_ended(10)
    second = ask(world, num_prompt=33, max_tokens=5)
    world.run_until_ended(10)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert first.token_ids == second.token_ids


def test_a_short_request_that_arrives_late_ends_before_a_long_one(start: StartWorld) -> None:
    world = start(*pools())
    long = ask(world, num_prompt=200, max_tokens=4)
    world.clock.run_for(0.02)
    short = ask(world, num_prompt=4, max_tokens=4, family=1)
    world.run_until_ended(10)
    assert short.ended_s < long.ended_s


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("seed", range(3))
def test_streams_go_on_when_a_worker_dies(start: StartWorld, role: Role, seed: int) -> None:
    world = start(*pools(2), *pool(Role.BOTH, 2), seed=seed)
    random = Random(seed)
    clients = ask_some(world, 6, random)
    world.clock.run_for(random.uniform(0.0, 0.3))
    world.kill(random.choice(world.pool(role)))
    world.run_until_ended(60)
    assert_completed(*clients)
    assert_at_rest(world)


@pytest.mark.parametrize("seed", range(15))
def test_streams_go_on_when_all_workers_die_at_once_and_come_back(start: StartWorld, seed: int) -> None:
    """The gateway learns of the deaths one by one, in any order, and resumes what it can at workers that are dead."""
    world = start(*pools(2), seed=seed)
    random = Random(seed)
    clients = ask_some(world, 6, random)
    world.clock.run_for(random.uniform(0.0, 0.5))
    for worker in random.sample(world.workers, k=4):
        world.kill(worker)
        world.clock.after(random.uniform(1.0, 4.0), lambda name=worker.name: world.start_again(name))
    world.run_until_ended(60)
    assert_completed(*clients)
    assert_at_rest(world)


def test_constant_preemption_yields_the_same_tokens(start: StartWorld) -> None:
    world = start(*pool(Role.PREFILL, num_blocks=40), *pool(Role.DECODE, num_blocks=13))
    clients = [ask(world, num_prompt=20, max_tokens=24, family=family) for family in range(6)]
    world.run_until_ended(60)
    assert_completed(*clients)
    assert counters(world, Role.DECODE)["preemptions"] > 0
    assert_at_rest(world)


def test_a_worker_that_does_both_computes_every_token_and_a_long_prompt_beside_a_stream(start: StartWorld) -> None:
    world = start(*pool(Role.BOTH))
    stream = ask(world, num_prompt=8, max_tokens=60)
    world.run_until(lambda: bool(stream.token_ids), 10)
    num_before = len(stream.token_ids)
    late = ask(world, num_prompt=160, max_tokens=2, family=1)
    world.run_until(lambda: bool(late.token_ids), 10)
    assert len(stream.token_ids) >= num_before + 10, "each of its ten chunks is computed beside a token"
    world.run_until_ended(10)
    both = counters(world, Role.BOTH)
    assert (both["prompt_tokens_computed"], both["output_tokens_computed"]) == (168, 60)
    assert (both["first_tokens_sampled"], both["later_tokens_sampled"]) == (2, 60)
    assert_at_rest(world)


@pytest.mark.parametrize("num_blocks", [13, 14, 16, 20])
def test_workers_that_do_both_come_to_an_end_in_a_pool_that_holds_one_request(
    start: StartWorld, num_blocks: int
) -> None:
    """Whatever runs beside the oldest waits or is preempted, and every token is the one it would have been."""
    world = start(*pool(Role.BOTH, num_blocks=num_blocks))
    clients = [ask(world, num_prompt=5 + 2 * index, max_tokens=24, family=index % 4) for index in range(12)]
    world.run_until_ended(60)
    assert_completed(*clients)
    assert counters(world, Role.BOTH)["preemptions"] > 0
    assert_at_rest(world)


def test_a_stream_without_a_decode_worker_ends_with_an_error_within_its_deadline(start: StartWorld) -> None:
    world = start(*pools(), resume_timeout_s=3.0)
    client = ask(world, num_prompt=8, max_tokens=200)
    world.run_until(lambda: len(client.token_ids) > 5, 10)
    world.kill(world.pool(Role.DECODE)[0])
    killed_s = world.now
    world.run_until_ended(10)
    assert client.error is not None
    assert client.error.status == 503
    assert client.ended_s - killed_s < 4.0
    assert_at_rest(world)


@pytest.mark.parametrize("workers", [pools(2), pool(Role.BOTH, 2)], ids=["split", "aggregated"])
def test_a_draining_worker_hands_its_queue_over_without_an_error(start: StartWorld, workers: list[WorkerPlan]) -> None:
    world = start(*workers)
    clients = [ask(world, num_prompt=50, max_tokens=40, family=family) for family in range(8)]
    world.clock.run_for(0.05)
    for role in {worker.role for worker in world.workers}:
        world.pool(role)[0].leave()
    world.run_until_ended(60)
    assert_completed(*clients)
    assert len(world.workers) == len(workers) / 2, "who was told to stop has left"
    assert_at_rest(world)
