"""The path of a request through real services: undisturbed, and with workers that die on the way."""

from random import Random

import pytest

from common.sampling import FinishReason, SamplingParams
from common.wire import Role
from gateway.life import LifePolicy
from tests.fakes import expected_tokens
from tests.sim.ring import Client, World


def make_world(seed: int = 0, **overrides: float) -> World:
    limits = {
        "max_concurrent_requests": 512,
        "request_timeout_s": 60.0,
        "when_no_prefill": "queue",
        "no_worker_timeout_s": 5.0,
        "resume_timeout_s": 10.0,
        "max_attempts": 3,
    }
    return World(seed, LifePolicy(**{**limits, **overrides}))  # type: ignore[arg-type]


def start_pools(world: World, num_prefill: int = 1, num_decode: int = 1, num_both: int = 0, **options: int) -> None:
    for role, count in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode), (Role.BOTH, num_both)):
        for index in range(count):
            world.start_worker(role, f"{role}-{index}", **options)
    world.run_until(lambda: not world.requests.fleet.missing_pools(), 5.0)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randrange(1000) for _ in range(length))


def assert_at_rest(world: World) -> None:
    """When all requests have ended, no block is owned."""
    world.run_for(8.0)
    for worker in world.workers.values():
        worker.blocks.check()
        assert worker.blocks.num_owned == 0, f"{worker.peer} still owns blocks"
    assert len(world.requests) == 0


def test_tokens_come_through_both_pools_in_order() -> None:
    world = make_world()
    start_pools(world)
    sampling = SamplingParams(max_tokens=20, temperature=0)
    client = world.submit("a", prompt(1, 37), sampling)
    world.run_until_ended()
    assert client.token_ids == expected_tokens(prompt(1, 37), sampling)
    assert client.finish is not None
    assert client.finish.reason is FinishReason.LENGTH
    prefill, decode = (world.pool(role)[0].counters() for role in (Role.PREFILL, Role.DECODE))
    assert (prefill["prompt_tokens_computed"], decode["prompt_tokens_computed"]) == (37, 0)
    assert (prefill["first_tokens_sampled"], prefill["later_tokens_sampled"]) == (1, 0)
    assert (decode["first_tokens_sampled"], decode["later_tokens_sampled"]) == (0, 19)
    assert_at_rest(world)


def test_a_request_of_one_token_never_reaches_decode() -> None:
    world = make_world()
    start_pools(world)
    client = world.submit("a", prompt(1, 9), SamplingParams(max_tokens=1, temperature=0))
    world.run_until_ended()
    assert len(client.token_ids) == 1
    assert world.pool(Role.DECODE)[0].counters()["steps"] == 0
    assert_at_rest(world)


def test_a_prompt_given_twice_is_cached_the_second_time() -> None:
    world = make_world()
    start_pools(world)
    sampling = SamplingParams(max_tokens=5, temperature=0)
    first = world.submit("a", prompt(1, 33), sampling)
    world.run_until_ended()
    second = world.submit("b", prompt(1, 33), sampling)
    world.run_until_ended()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert first.token_ids == second.token_ids


def test_a_short_request_that_arrives_late_ends_before_a_long_one() -> None:
    world = make_world()
    start_pools(world, max_batch_tokens=16)
    long = world.submit("long", prompt(1, 200), SamplingParams(max_tokens=4, temperature=0))
    world.run_for(0.02)
    short = world.submit("short", prompt(2, 4), SamplingParams(max_tokens=4, temperature=0))
    world.run_until_ended()
    assert short.ended_s < long.ended_s


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("seed", range(10))
def test_streams_go_on_when_a_worker_dies(role: Role, seed: int) -> None:
    world = make_world(seed)
    start_pools(world, num_prefill=2, num_decode=2, num_both=2)
    random = Random(seed)
    requests = []
    for index in range(6):
        sampling = SamplingParams(max_tokens=random.randint(2, 30), temperature=index % 2, seed=index)
        tokens = prompt(index, random.randint(1, 60))
        requests.append((world.submit(f"r{index}", tokens, sampling), expected_tokens(tokens, sampling)))
    world.run_for(random.uniform(0.0, 0.3))
    world.kill(random.choice(world.pool(role)))
    world.run_until_ended()
    for client, expected in requests:
        assert client.error is None
        assert client.token_ids == expected
    assert_at_rest(world)


@pytest.mark.parametrize("seed", range(60))
def test_streams_go_on_when_all_workers_die_at_once_and_come_back(seed: int) -> None:
    """The gateway learns of the deaths one by one, in any order, and resumes what it can at workers that are dead."""
    world = make_world(seed)
    start_pools(world, num_prefill=2, num_decode=2)
    random = Random(seed)
    requests = []
    for index in range(6):
        sampling = SamplingParams(max_tokens=random.randint(2, 60), temperature=index % 2, seed=index)
        tokens = prompt(index, random.randint(1, 60))
        requests.append((world.submit(f"r{index}", tokens, sampling), expected_tokens(tokens, sampling)))
        world.run_for(random.uniform(0.0, 0.1))
    for worker in random.sample([*world.workers.values()], k=4):
        world.kill(worker)
        world.clock.after(random.uniform(1.0, 4.0), lambda worker=worker: world.start_worker(worker.role, worker.name))
    world.run_until_ended()
    for client, expected in requests:
        assert client.error is None
        assert client.token_ids == expected
    assert_at_rest(world)


def test_constant_preemption_yields_the_same_tokens() -> None:
    world = make_world()
    world.start_worker(Role.PREFILL, "prefill", num_blocks=40)
    world.start_worker(Role.DECODE, "decode", num_blocks=13)
    requests = []
    for index in range(6):
        sampling = SamplingParams(max_tokens=24, temperature=index % 2, seed=index)
        requests.append(
            (world.submit(f"r{index}", prompt(index, 20), sampling), expected_tokens(prompt(index, 20), sampling))
        )
    world.run_until_ended()
    for client, expected in requests:
        assert client.token_ids == expected
    assert world.pool(Role.DECODE)[0].counters()["preemptions"] > 0
    assert_at_rest(world)


def submit_and_compute(world: World, name: str, num_prompt: int, max_tokens: int) -> Client:
    """Returns once its first token is out."""
    client = world.submit(name, prompt(len(name), num_prompt), SamplingParams(max_tokens=max_tokens, temperature=0))
    world.run_until(lambda: bool(client.token_ids), 10.0)
    return client


def test_a_worker_that_does_both_computes_every_token_and_a_long_prompt_beside_a_stream() -> None:
    world = make_world()
    world.start_worker(Role.BOTH, "both", max_batch_tokens=16)
    world.run_until(lambda: not world.requests.fleet.missing_pools(), 5.0)
    stream = submit_and_compute(world, "a", num_prompt=8, max_tokens=60)
    num_before = len(stream.token_ids)
    submit_and_compute(world, "bb", num_prompt=160, max_tokens=2)
    assert len(stream.token_ids) >= num_before + 10, "each of its ten chunks is computed beside a token"
    world.run_until_ended()
    counters = world.pool(Role.BOTH)[0].counters()
    assert (counters["prompt_tokens_computed"], counters["output_tokens_computed"]) == (168, 60)
    assert (counters["first_tokens_sampled"], counters["later_tokens_sampled"]) == (2, 60)
    assert_at_rest(world)


@pytest.mark.parametrize("num_blocks", [13, 14, 16, 20])
def test_workers_that_do_both_come_to_an_end_in_a_pool_that_holds_one_request(num_blocks: int) -> None:
    """Whatever runs beside the oldest waits or is preempted, and every token is the one it would have been."""
    world = make_world()
    worker = world.start_worker(Role.BOTH, "both", num_blocks=num_blocks)
    requests = []
    for index in range(12):
        sampling = SamplingParams(max_tokens=24, temperature=index % 2, seed=index)
        tokens = prompt(index % 4, 5 + 2 * index)
        requests.append((world.submit(f"r{index}", tokens, sampling), expected_tokens(tokens, sampling)))
    world.run_until_ended()
    for client, expected in requests:
        assert client.token_ids == expected
    assert worker.counters()["preemptions"] > 0
    assert_at_rest(world)


def test_a_stream_without_a_decode_worker_ends_with_an_error_within_its_deadline() -> None:
    world = make_world(resume_timeout_s=3.0)
    start_pools(world)
    client = world.submit("a", prompt(1, 8), SamplingParams(max_tokens=200, temperature=0))
    world.run_until(lambda: len(client.token_ids) > 5, 10)
    world.kill(world.pool(Role.DECODE)[0])
    killed_s = world.now
    world.run_until_ended()
    assert client.error is not None
    assert client.error.status == 503
    assert client.ended_s - killed_s < 4.0
    assert_at_rest(world)


@pytest.mark.parametrize(
    "pools", [{"num_prefill": 2, "num_decode": 2}, {"num_prefill": 0, "num_decode": 0, "num_both": 2}]
)
def test_a_draining_worker_hands_its_queue_over_without_an_error(pools: dict[str, int]) -> None:
    world = make_world()
    start_pools(world, **pools)
    sampling = SamplingParams(max_tokens=40, temperature=0)
    requests = [
        (world.submit(f"r{i}", prompt(i, 50), sampling), expected_tokens(prompt(i, 50), sampling)) for i in range(8)
    ]
    world.run_for(0.05)
    for role in {worker.role for worker in world.workers.values()}:
        world.pool(role)[0].drain()
    world.run_until_ended()
    for client, expected in requests:
        assert client.token_ids == expected


@pytest.mark.parametrize("seed", range(40))
def test_aborts_at_random_moments_leave_nothing_behind(seed: int) -> None:
    world = make_world(seed)
    start_pools(world, num_decode=2, num_blocks=30)
    random = Random(seed)
    kept = []
    for index in range(10):
        tokens, sampling = prompt(index % 3, random.randint(1, 70)), SamplingParams(max_tokens=random.randint(1, 20))
        client = world.submit(f"r{index}", tokens, sampling)
        if random.random() < 0.5:
            world.clock.after(random.uniform(0, 1), lambda name=f"r{index}": world.abort(name))
        else:
            kept.append((client, expected_tokens(tokens, sampling)))
        world.run_for(random.uniform(0, 0.1))
    world.run_for(1.0)
    world.run_until_ended()
    for client, expected in kept:
        assert client.token_ids == expected
    assert_at_rest(world)
