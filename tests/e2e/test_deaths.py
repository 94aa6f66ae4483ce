"""Processes that die or freeze while they serve: every stream goes on, with the tokens that it would have had."""

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.clients import SAMPLINGS, Stream, ask, ask_all, completion, stream_all, token_ids
from tests.e2e.stack import Stack
from tests.e2e.tiny import save_tiny

NUM_WORKERS = 4
NUM_REQUESTS = 8
NUM_TOKENS = 300
NUM_SEEN = 60
"""Tokens over all streams when something happens: every stream has begun, none is near its end."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("deaths")
    save_tiny(folder / "model")
    running = Stack(
        *(f"--model={folder / 'model'}", "--dtype=float32", "--kv-cache-memory=20MB"),
        *("--prefill=2", "--decode=2", "--max-batch-prefill-tokens=32"),
        log_dir=folder,
    )
    yield running
    assert running.stop() == 0


@pytest.fixture
def stack(running: Stack) -> Iterator[Stack]:
    """At rest before, and after: all workers are there, and none owns a block."""
    running.wait_until_at_rest(NUM_WORKERS)
    yield running
    running.wait_until_at_rest(NUM_WORKERS)


def bodies(first: int, num_prompt: int, num_tokens: int) -> list[dict[str, Any]]:
    prompts = [[(index * 29 + first + number) % 256 for index in range(num_prompt)] for number in range(NUM_REQUESTS)]
    return [
        completion(prompt, max_tokens=num_tokens, **SAMPLINGS[number % len(SAMPLINGS)])
        for number, prompt in enumerate(prompts)
    ]


def prefill_total(stack: Stack, counter: str) -> float:
    return stack.metric(f"baton_worker_{counter}", 'role="prefill"')


def check_against_undisturbed(stack: Stack, requests: list[dict[str, Any]], streams: list[Stream]) -> None:
    undisturbed = [token_ids(answer) for answer in ask_all(stack.url, requests)]
    assert [stream.token_ids for stream in streams] == undisturbed
    assert [stream.num_terminal_frames for stream in streams] == [1] * len(streams)


def test_streams_go_on_when_a_decode_worker_is_killed(stack: Stack) -> None:
    requests = bodies(first=0, num_prompt=40, num_tokens=NUM_TOKENS)
    old_pid, num_resumed = stack.pid("decode-0"), prefill_total(stack, "later_tokens_sampled")
    streams = stream_all(stack.url, requests, when=[(NUM_SEEN, lambda: stack.signal("decode-0", signal.SIGKILL))])
    stack.wait_until(lambda: prefill_total(stack, "later_tokens_sampled") > num_resumed)
    check_against_undisturbed(stack, requests, streams)
    stack.wait_until_restarted("decode-0", old_pid)


def test_streams_go_on_when_a_decode_worker_freezes_and_wakes_up_again(stack: Stack) -> None:
    requests = bodies(first=50, num_prompt=40, num_tokens=NUM_TOKENS)
    num_resumed = prefill_total(stack, "later_tokens_sampled")
    # Not one token sooner than its streams have gone on elsewhere: how many it sends before it is stopped is its speed.
    nearly_all_are_done = NUM_REQUESTS * NUM_TOKENS - NUM_TOKENS // 2
    streams = stream_all(
        stack.url,
        requests,
        when=[
            (NUM_SEEN, lambda: stack.signal("decode-1", signal.SIGSTOP)),
            (nearly_all_are_done, lambda: stack.signal("decode-1", signal.SIGCONT)),
        ],
    )
    stack.wait_until(lambda: prefill_total(stack, "later_tokens_sampled") > num_resumed)
    check_against_undisturbed(stack, requests, streams)


def test_prompts_queued_at_a_prefill_worker_that_is_killed_are_computed_elsewhere(stack: Stack) -> None:
    requests = bodies(first=100, num_prompt=400, num_tokens=20)
    old_pid, num_computed = stack.pid("prefill-0"), stack.counters("prefill-1")["first_tokens_sampled"]
    stack.signal("prefill-0", signal.SIGSTOP)  # so that what it gets stays queued
    streams = stream_all(stack.url, requests, when=[(1, lambda: stack.signal("prefill-0", signal.SIGKILL))])
    stack.wait_until(lambda: stack.counters("prefill-1")["first_tokens_sampled"] == num_computed + NUM_REQUESTS)
    check_against_undisturbed(stack, requests, streams)
    stack.wait_until_restarted("prefill-0", old_pid)


def test_workers_drop_what_a_killed_gateway_asked_for_and_serve_the_next_one(stack: Stack) -> None:
    requests = bodies(first=150, num_prompt=40, num_tokens=NUM_TOKENS)
    old_pid = stack.pid("gateway")
    with pytest.raises(httpx.TransportError):
        stream_all(stack.url, requests, when=[(NUM_SEEN, lambda: stack.signal("gateway", signal.SIGKILL))])
    stack.wait_until_restarted("gateway", old_pid)
    stack.wait_until_at_rest(NUM_WORKERS)
    assert ask(stack.url, requests[0])["usage"]["completion_tokens"] == NUM_TOKENS


def kill_all_workers(stack: Stack) -> None:
    for name in ("prefill-0", "decode-0", "prefill-1", "decode-1"):
        stack.signal(name, signal.SIGKILL)


def test_streams_go_on_when_all_workers_are_killed_at_once(stack: Stack) -> None:
    """However few attempts a request has: it is one incident."""
    requests = bodies(first=200, num_prompt=40, num_tokens=NUM_TOKENS)
    counted = ("baton_gateway_retries_total", "baton_gateway_links_lost_connection_total")
    before = [stack.metric(name) for name in counted]
    streams = stream_all(stack.url, requests, when=[(NUM_SEEN, lambda: kill_all_workers(stack))])
    retries, losses = (stack.metric(name) - old for name, old in zip(counted, before, strict=True))
    assert retries >= NUM_REQUESTS
    assert losses >= NUM_WORKERS
    check_against_undisturbed(stack, requests, streams)


def test_a_request_waits_for_workers_that_are_being_started_again(stack: Stack) -> None:
    kill_all_workers(stack)
    assert ask(stack.url, completion([1, 2, 3], max_tokens=5))["usage"]["completion_tokens"] == 5
