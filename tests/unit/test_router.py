"""Whom a request goes to: least work, cached prefixes, and chance among equals."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.block_hashes import hash_blocks
from common.ids import PeerId
from common.wire import Role
from gateway.fleet import Worker
from gateway.prefixes import MAX_REMEMBERED, SentPrefixes
from gateway.router import pick_decode, pick_prefill
from tests.fakes import fake_layout
from tests.unit.requests_rig import status

BLOCK = fake_layout().block_size


def worker(name: str, **fields: int) -> Worker:
    peer = PeerId(f"{name}#1")
    return Worker(peer, replace(status(peer, Role.PREFILL), **fields), 0.0)


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def send(workers: list[Worker], token_ids: list[int], preferred: PeerId | None = None, seed: int = 0) -> str:
    return pick_prefill(workers, token_ids, preferred, Random(seed)).status.name


def send_decode(workers: list[Worker], num_blocks: int, seed: int = 0) -> str:
    return pick_decode(workers, num_blocks, Random(seed)).status.name


def test_prefill_goes_to_the_shortest_queue_counting_what_was_just_sent() -> None:
    workers = [worker("a", num_waiting_tokens=10), worker("b", num_waiting_tokens=50)]
    assert [send(workers, prompt(30, first)) for first in (0, 100, 200)] == ["a", "a", "b"]


def test_a_resumed_prompt_goes_to_the_worker_that_computed_it_however_long_its_queue_is() -> None:
    workers = [worker("a"), worker("b", num_waiting_tokens=10_000)]
    assert send(workers, prompt(8), preferred=PeerId("b#1")) == "b"
    assert send(workers[:1], prompt(8), preferred=PeerId("b#1")) == "a"


def test_decode_goes_where_most_blocks_are_free_then_where_fewest_run() -> None:
    workers = [worker("a", num_free_blocks=10), worker("b", num_free_blocks=30)]
    assert [send_decode(workers, 15) for _ in range(3)] == ["b", "b", "a"]
    workers = [worker("a", num_running=3), worker("b", num_running=1)]
    assert send_decode(workers, 1) == "b"


@pytest.mark.parametrize("seed", range(10))
def test_a_prompt_goes_where_its_prefix_was_sent(seed: int) -> None:
    workers = [worker(name) for name in "abc"]
    shared = prompt(10 * BLOCK)
    first = send(workers, [*shared, 1], seed=seed)
    assert send(workers, [*shared, 2], seed=seed + 1) != first, "while the first one waits it is no shorter there"
    for each in workers:
        each.take(each.status, 1.0)
    holders = {each.status.name for each in workers if len(each.prefixes)}
    assert send(workers, [*shared, 3], seed=seed) in holders


def test_a_cached_prefix_counts_as_much_as_it_saves_and_no_more() -> None:
    cached, idle = worker("cached"), worker("idle")
    cached.prefixes.add(hash_blocks(prompt(10 * BLOCK), BLOCK))
    prompts = [[*prompt(10 * BLOCK), *prompt(BLOCK, 1000 * number)] for number in range(1, 20)]
    picked = [send([cached, idle], token_ids, seed=number) for number, token_ids in enumerate(prompts)]
    assert picked[:10] == ["cached"] * 10
    assert "idle" in picked[10:12], "by then what waits there takes as long as the prefix"
    assert abs(cached.sent_tokens - idle.sent_tokens) <= 11 * BLOCK, "so no spot is hot"


def test_the_last_token_is_computed_even_where_all_blocks_are_cached() -> None:
    (only,) = workers = [worker("a")]
    for _ in range(2):
        send(workers, prompt(2 * BLOCK))
    assert only.sent_tokens == 2 * BLOCK + BLOCK


def test_blocks_of_another_size_are_not_the_same_blocks() -> None:
    peer = PeerId("b#1")
    other = Worker(peer, status(peer, Role.PREFILL, layout=fake_layout(block_size=2 * BLOCK)), 0.0)
    workers = [worker("a", num_waiting_tokens=BLOCK), other]
    other.prefixes.add(hash_blocks(prompt(4 * BLOCK), BLOCK))
    send(workers, prompt(4 * BLOCK + 1))
    assert other.sent_tokens == 4 * BLOCK + 1


def test_gateways_that_see_the_same_statuses_do_not_all_pick_the_same_worker() -> None:
    picked = Counter(send([worker(name) for name in "abcd"], prompt(20), seed=seed) for seed in range(200))
    assert min(picked[name] for name in "abcd") > 20
    picked = Counter(send_decode([worker(name) for name in "abcd"], 5, seed=seed) for seed in range(200))
    assert min(picked[name] for name in "abcd") > 20


@given(
    loads=st.lists(st.integers(0, 100), min_size=1, max_size=6), length=st.integers(1, 60), seed=st.integers(0, 2**32)
)
def test_what_is_picked_is_hardly_worse_than_the_best(loads: list[int], length: int, seed: int) -> None:
    workers = [worker(f"w{index}", num_waiting_tokens=load) for index, load in enumerate(loads)]
    picked = pick_prefill(workers, prompt(length), None, Random(seed))
    assert picked.status.num_waiting_tokens < min(loads) + length
    workers = [worker(f"w{index}", num_free_blocks=load) for index, load in enumerate(loads)]
    assert pick_decode(workers, length, Random(seed)).status.num_free_blocks > max(loads) - length


def test_the_tails_of_prompts_sent_long_ago_are_forgotten_first() -> None:
    prefixes = SentPrefixes(num_blocks=4)
    old, new = hash_blocks(prompt(3 * BLOCK), BLOCK), hash_blocks(prompt(2 * BLOCK, 500), BLOCK)
    prefixes.add(old)
    prefixes.add(new)
    assert (prefixes.num_leading(old), prefixes.num_leading(new), len(prefixes)) == (2, 2, 4)
    prefixes.add(old[:1])
    prefixes.add(hash_blocks(prompt(BLOCK, 900), BLOCK))
    assert prefixes.num_leading(old) == 1


def test_however_large_a_cache_is_said_to_be_what_is_remembered_of_it_is_bounded() -> None:
    prefixes = SentPrefixes(num_blocks=2**60)
    prefixes.add([number.to_bytes(16, "little") for number in range(MAX_REMEMBERED + 10)])
    assert len(prefixes) == MAX_REMEMBERED
