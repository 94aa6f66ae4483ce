"""Gateways and workers that come and go under load: whoever is left serves, and only the dead one's clients notice."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.clients import SAMPLINGS, Stream, ask_all, completion, stream_all, token_ids
from tests.e2e.front import Front
from tests.e2e.services import Services, url_of, wait_until_ready
from tests.e2e.stack import START_S, wait_until

NUM_REQUESTS = 6
NUM_TOKENS = 300
NUM_SEEN = 60
"""Tokens over all streams when something happens: most streams have begun, none is near its end."""
LEAVE_S = 60.0


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with ExitStack() as stack:
        yield Services(tmp_path, stack)


def bodies(first: int) -> list[dict[str, Any]]:
    prompts = [[(index * 29 + first + number) % 256 for index in range(40)] for number in range(NUM_REQUESTS)]
    return [
        completion(prompt, max_tokens=NUM_TOKENS, **SAMPLINGS[number % len(SAMPLINGS)])
        for number, prompt in enumerate(prompts)
    ]


def check_against_undisturbed(url: str, requests: list[dict[str, Any]], streams: list[Stream]) -> None:
    assert [stream.token_ids for stream in streams] == [token_ids(answer) for answer in ask_all(url, requests)]
    assert [stream.num_terminal_frames for stream in streams] == [1] * len(streams)


def test_when_one_of_two_gateways_is_killed_only_its_own_clients_notice(services: Services) -> None:
    names = ("doomed", "other")
    doomed, other = (services.start_gateway(name=name) for name in names)
    for role in ("prefill", "decode"):
        services.start_worker(role, role, gateways=names)
    doomed_url, other_url = url_of(doomed), url_of(other)
    wait_until_ready(doomed)
    wait_until_ready(other)
    requests = bodies(first=0)
    others_run = threading.Event()

    def kill() -> None:
        assert others_run.wait(START_S)
        doomed.kill()

    with ThreadPoolExecutor() as pool:
        lost = pool.submit(stream_all, doomed_url, bodies(first=100), when=[(NUM_SEEN, kill)])
        kept = pool.submit(stream_all, other_url, requests, when=[(NUM_SEEN, others_run.set)])
        with pytest.raises(httpx.TransportError):
            lost.result()
        streams = kept.result()
    check_against_undisturbed(other_url, requests, streams)
    Front(other_url).wait_until_at_rest()


@pytest.mark.parametrize("drain_timeout", ["30", "0"], ids=["what runs comes to its end", "what runs goes elsewhere"])
def test_workers_that_are_told_to_leave_under_load_cost_no_client_anything(
    services: Services, drain_timeout: str
) -> None:
    gateway = services.start_gateway()
    prefill, _ = (services.start_worker("prefill", name, f"--drain-timeout={drain_timeout}") for name in ("p0", "p1"))
    decode, _ = (services.start_worker("decode", name, f"--drain-timeout={drain_timeout}") for name in ("d0", "d1"))
    front = Front(url_of(gateway))
    front.wait_until(lambda: all(front.counters(name) for name in ("p0", "p1", "d0", "d1")), START_S)
    requests = bodies(first=50)
    streams = stream_all(
        front.url,
        requests,
        delays_s=[0.0] * (NUM_REQUESTS // 2) + [0.1 * number for number in range(NUM_REQUESTS // 2)],
        when=[(NUM_SEEN, decode.terminate), (2 * NUM_SEEN, prefill.terminate)],
    )
    assert (decode.wait(LEAVE_S), prefill.wait(LEAVE_S)) == (0, 0)
    check_against_undisturbed(front.url, requests, streams)
    front.wait_until_at_rest()


def test_a_gateway_that_is_told_to_leave_lets_its_streams_end_and_takes_no_new_ones(services: Services) -> None:
    names = ("leaving", "other")
    leaving, other = (services.start_gateway(name=name) for name in names)
    for role in ("prefill", "decode"):
        services.start_worker(role, role, gateways=names)
    wait_until_ready(leaving)
    wait_until_ready(other)
    url = url_of(leaving)

    def leave() -> None:
        leaving.terminate()
        leaving.wait_for(r"(draining for at most)", LEAVE_S)
        wait_until(lambda: not accepts(url), LEAVE_S)

    requests = bodies(first=200)
    streams = stream_all(url, requests, when=[(NUM_SEEN, leave)])
    assert leaving.wait(LEAVE_S) == 0
    check_against_undisturbed(url_of(other), requests, streams)
    Front(url_of(other)).wait_until_at_rest()


def accepts(url: str) -> bool:
    try:
        return httpx.get(f"{url}/version").is_success
    except httpx.TransportError:
        return False
