"""What stories in a simulated world are told with."""

from random import Random

from common.wire import Role
from tests.sim.gateway import Client
from tests.sim.plan import Arrival, WorkerPlan
from tests.sim.world import World


def pool(role: Role, count: int = 1, num_blocks: int = 64, max_batch_tokens: int = 16) -> list[WorkerPlan]:
    return [
        WorkerPlan(name=f"{role}-{index}", role=role, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens)
        for index in range(count)
    ]


def pools(count: int = 1) -> list[WorkerPlan]:
    """So many workers of each of the two pools."""
    return pool(Role.PREFILL, count) + pool(Role.DECODE, count)


def ask(world: World, num_prompt: int, max_tokens: int, family: int = 0) -> Client:
    return world.submit(Arrival(at_s=world.now, num_prompt=num_prompt, max_tokens=max_tokens, family=family))


def ask_some(world: World, count: int, random: Random) -> list[Client]:
    """Requests of any size, of as many families."""
    return [ask(world, random.randint(1, 60), random.randint(2, 30), family) for family in range(count)]


def counters(world: World, role: Role) -> dict[str, float]:
    return world.pool(role)[0].counters()


def assert_completed(*clients: Client) -> None:
    """With the tokens of the undisturbed model."""
    for client in clients:
        assert client.error is None
        assert client.token_ids == client.expected


def assert_at_rest(world: World) -> None:
    world.clock.run_for(8.0)
    assert world.unrest() == ""
    for worker in world.workers:
        worker.blocks.check()
