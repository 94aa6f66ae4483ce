"""The real stack in real containers, scaled, killed, paused and cut off under load."""

import time
from collections.abc import Callable
from statistics import fmean

import httpx
import pytest

from tests.compose.project import Project
from tests.e2e.clients import SAMPLINGS, ask_all, completion, token_ids
from tests.e2e.load import Load

pytestmark = pytest.mark.docker

MAX_IMAGE_BYTES = 1.6e9
NUM_CLIENTS = 6
NUM_TOKENS = 80
NUM_SEEN = 100
"""Tokens over all streams before something happens: most streams are in the middle."""
NUM_MEASURED = 300
NUM_PROMPTS = 4
NUM_PROMPTS = 4
PAUSE_S = 5.0
REJOIN_S = 60.0
MAX_SLOWDOWN = 2.0

BODIES = [
    completion(
        f"Chapter {number}. Once upon a time there was a",
        max_tokens=NUM_TOKENS,
        **SAMPLINGS[number % len(SAMPLINGS)],
    )
    for number in range(8)
]


@pytest.fixture(scope="session")
def answers(project: Project) -> list[list[int]]:
    """Undisturbed."""
    return [token_ids(answer) for answer in ask_all(project.url, BODIES)]


@pytest.fixture
def load(project: Project, answers: list[list[int]]) -> Load:
    project.up(prefill=2, decode=2)
    project.wait_until_at_rest(num_workers=4)
    return Load(project.url, BODIES, NUM_CLIENTS)


def check_nothing_is_left(project: Project, num_workers: int = 4) -> None:
    assert httpx.get(f"{project.url}/ready").status_code == 200
    project.wait_until_at_rest(num_workers, timeout_s=REJOIN_S)


def test_one_image_without_a_compiler_holds_all_services(project: Project) -> None:
    assert project.image_bytes() <= MAX_IMAGE_BYTES
    assert project.docker("run", "--rm", "--entrypoint=id", "baton:test", "-u").strip() == "10001"
    tools = "command -v cc gcc g++ || true"
    assert project.docker("run", "--rm", "--entrypoint=sh", "baton:test", "-c", tools) == ""


def test_a_chat_is_streamed(project: Project) -> None:
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": True}
    body = {**chat, "temperature": 0, "max_tokens": 24}
    with httpx.stream("POST", f"{project.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line]
    assert "Paris" in "".join(lines)
    assert lines[-1] == "data: [DONE]"


def test_scaling_both_pools_up_and_down_costs_no_client_anything(
    project: Project, load: Load, answers: list[list[int]], seen: dict[str, str]
) -> None:
    with load:
        load.wait_for_tokens(NUM_SEEN)
        for sizes in ({"prefill": 1, "decode": 3}, {"prefill": 2, "decode": 1}, {"prefill": 2, "decode": 2}):
            project.up(**sizes)
            assert {role: len(project.containers(role)) for role in sizes} == sizes
            load.wait_for_tokens(NUM_SEEN)
    load.check(answers)
    seen["scaled under load"] = f"{len(load.streams)} streams, 0 errors, longest gap {load.longest_gap_s:.1f} s"
    check_nothing_is_left(project)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_killing_a_container_in_mid_stream_costs_no_client_more_than_a_pause(
    project: Project, load: Load, answers: list[list[int]], seen: dict[str, str], role: str
) -> None:
    with load:
        load.wait_for_tokens(NUM_SEEN)
        project.docker("kill", project.containers(role)[0])
        load.wait_for_tokens(NUM_SEEN)
        project.up(prefill=2, decode=2)
        load.wait_for_tokens(NUM_SEEN)
    load.check(answers)
    seen[f"docker kill, {role}"] = f"{len(load.streams)} streams, 0 errors, longest gap {load.longest_gap_s:.1f} s"
    check_nothing_is_left(project)


def _paused(project: Project, container: str) -> None:
    project.pause(container, PAUSE_S)


def _cut_off(project: Project, container: str) -> None:
    project.docker("network", "disconnect", project.network(), container)
    project.wait_until(lambda: not project.worker(container), REJOIN_S)
    project.docker("network", "connect", project.network(), container)


@pytest.mark.parametrize("disturb", [_paused, _cut_off], ids=["paused for 5 s", "cut off from the network"])
def test_a_worker_that_comes_back_after_silence_is_used_again(
    project: Project,
    load: Load,
    answers: list[list[int]],
    seen: dict[str, str],
    disturb: Callable[[Project, str], None],
) -> None:
    container = project.containers("decode")[0]
    with load:
        load.wait_for_tokens(NUM_SEEN)
        disturb(project, container)
        project.wait_until(lambda: bool(project.worker(container)), REJOIN_S)
        load.wait_for_tokens(NUM_SEEN)
    load.check(answers)
    what = disturb.__name__.strip("_").replace("_", " ")
    seen[f"decode worker {what}"] = f"{len(load.streams)} streams, 0 errors, longest gap {load.longest_gap_s:.1f} s"
    check_nothing_is_left(project)


def test_a_restarted_gateway_finds_its_workers_again(
    project: Project, answers: list[list[int]], load: Load, seen: dict[str, str]
) -> None:
    with load:
        load.wait_for_tokens(NUM_SEEN)
        project.compose("restart", "gateway")
    project.find_gateway()
    project.wait_until(lambda: httpx.get(f"{project.url}/ready").status_code == 200, REJOIN_S)
    project.wait_until_at_rest(num_workers=4, timeout_s=REJOIN_S)
    assert [token_ids(answer) for answer in ask_all(project.url, BODIES)] == answers
    check_nothing_is_left(project)


def test_steps_of_decode_beside_prompts_take_at_most_twice_as_long_as_alone(
    project: Project, seen: dict[str, str]
) -> None:
    project.up(prefill=1, decode=1)
    project.wait_until_at_rest(num_workers=2, timeout_s=REJOIN_S)
    prompts = [completion(f"{number}. " + "All work and no play. " * 120, max_tokens=1) for number in range(64)]
    streams = [completion("Once upon a time", max_tokens=NUM_MEASURED)] * 2
    with Load(project.url, streams, num_clients=2) as load:
        load.wait_for_tokens(NUM_MEASURED)
        beside_since_s = time.monotonic()
        with Load(project.url, prompts, num_clients=2) as busy:
            load.wait_for_tokens(NUM_MEASURED)
            busy.wait_for_tokens(NUM_PROMPTS)
            beside_s = fmean(load.gaps_s(since_s=beside_since_s))
    alone_s = fmean(load.gaps_s(until_s=beside_since_s))
    seen["decode's step"] = f"{1000 * alone_s:.0f} ms alone, {1000 * beside_s:.0f} ms beside prompts, means"
    assert beside_s <= MAX_SLOWDOWN * alone_s
    check_nothing_is_left(project, num_workers=2)
