"""KV transfer between worker groups of unequal sizes: real servers and pullers, one a rank."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest

from common.wire import Envelope
from kvtransfer.route import Mode
from kvtransfer.transport import AbortPull, KVReleased, SendRelease, Withdraw
from tests.service.kv_groups import HEAD_BYTES, NUM_BLOCKS, Groups, layout_of
from tests.service.kv_rig import DEADLINE_S, MODES, key, set_fetch_bytes

MakeGroups = Callable[..., Groups]
ONE_OF_3 = [range(3)]
TWO_OF_3 = [range(2), range(2, 3)]
THREE_OF_3 = [range(1), range(1, 2), range(2, 3)]
TWO_OF_2 = [range(1), range(1, 2)]
FOUR_OF_2 = [range(1), range(1), range(1, 2), range(1, 2)]
SPLITS = {
    "1 to 3": (ONE_OF_3, THREE_OF_3),
    "3 to 1": (THREE_OF_3, ONE_OF_3),
    "2 to 3": (TWO_OF_3, THREE_OF_3),
    "2 to 2, cut elsewhere": (TWO_OF_3, [range(1), range(1, 3)]),
    "2 to 2": (TWO_OF_2, TWO_OF_2),
    "2 to 4 that share heads": (TWO_OF_2, FOUR_OF_2),
    "4 that share heads to 2": (FOUR_OF_2, TWO_OF_2),
    "4 that share heads to 1": (FOUR_OF_2, [range(2)]),
    "2 to 1, two ranges of one shard": ([range(1, 2), range(3)], ONE_OF_3),
}
BLOCKS = range(2, 14)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    set_fetch_bytes(monkeypatch, 4 * HEAD_BYTES)
    monkeypatch.setattr("kvtransfer.server.RUN_BYTES", 2 * HEAD_BYTES)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param


@pytest.fixture
def make_groups() -> Iterator[MakeGroups]:
    made: list[Groups] = []

    def make(
        senders: Sequence[range], receivers: Sequence[range], mode: Mode, pull_timeout_s: float = DEADLINE_S
    ) -> Groups:
        made.append(Groups(senders, receivers, mode, pull_timeout_s))
        return made[-1]

    yield make
    for groups in made:
        groups.close()


@pytest.mark.parametrize("split", SPLITS)
def test_every_rank_gets_its_heads_and_writes_nothing_else(make_groups: MakeGroups, split: str, mode: Mode) -> None:
    groups = make_groups(*SPLITS[split], mode)
    start = groups.pull(key(1), BLOCKS)
    for receiver in groups.receivers:
        finished = receiver.wait(key(1))
        num_bytes = len(BLOCKS) * receiver.memory.block_bytes
        assert (finished.error, finished.num_bytes) == ("", num_bytes)
        assert receiver.counter(f"kv_received_bytes_{mode}") == num_bytes
        assert receiver.counter("kv_retried_blocks") == 0
        assert receiver.counter("kv_pulls") == 1
    groups.check_arrived(start)


def test_no_byte_is_sent_twice_to_a_rank(make_groups: MakeGroups) -> None:
    groups = make_groups(TWO_OF_3, THREE_OF_3, "tcp")
    groups.pull(key(1), BLOCKS)
    for receiver in groups.receivers:
        assert receiver.wait(key(1)).error == ""
    for sender in groups.senders:
        sender.server.close()  # its counters are final now
        assert sender.server.counters()["kv_sent_bytes"] == len(BLOCKS) * sender.memory.block_bytes


def test_a_pull_of_nothing_from_several_shards_finishes_once(make_groups: MakeGroups, mode: Mode) -> None:
    groups = make_groups(THREE_OF_3, ONE_OF_3, mode)
    groups.pull(key(1), [])
    assert groups.receivers[0].wait(key(1)).error == ""


def test_the_first_rank_is_told_of_a_release_and_no_other(make_groups: MakeGroups) -> None:
    groups = make_groups(TWO_OF_3, ONE_OF_3, "tcp")
    start = groups.pull(key(1), BLOCKS)
    (receiver,) = groups.receivers
    assert receiver.wait(key(1)).error == ""
    receiver.puller.apply(SendRelease(key(1), start.kv.source))
    first, second = groups.senders
    first.events.wait_for(lambda: first.events.num_released(key(1)))
    assert first.events.all == [KVReleased(key(1))]
    second.server.close()
    assert second.events.all == []


class HeldAnswers:
    """Two ranks hand over to one, and what they answer is kept back. by_rank: all that may be under way."""

    def __init__(self, groups: Groups) -> None:
        (receiver,) = groups.receivers
        self.by_rank: tuple[list[Envelope], list[Envelope]] = ([], [])
        self._changed = receiver.events.changed
        self.proxies = [groups.lie(rank, partial(self._hold, rank)) for rank in range(2)]
        groups.pull(key(1), BLOCKS)
        # Four fetches of two blocks with two heads each, and three fetches of four blocks with one head each.
        receiver.events.wait_for(lambda: [len(held) for held in self.by_rank] == [8, 12])

    def _hold(self, rank: int, answer: list[Envelope]) -> list[Envelope]:
        with self._changed:
            self.by_rank[rank].extend(answer)
            self._changed.notify_all()
        return []


def check_late_data_is_dropped(groups: Groups, held: HeldAnswers) -> None:
    """The pull has ended; now what the first rank had answered arrives."""
    (receiver,) = groups.receivers
    held.proxies[0].send_later(held.by_rank[0])
    groups.turn_until(receiver, lambda: receiver.counter("kv_refused_stale") == len(held.by_rank[0]))
    receiver.check_untouched()
    assert len(receiver.events.finished(key(1))) == 1
    assert receiver.counter("kv_pulls_failed") == 1


def test_a_rank_that_dies_ends_the_pull_and_nothing_is_written_later(make_groups: MakeGroups, mode: Mode) -> None:
    groups = make_groups(TWO_OF_3, ONE_OF_3, mode)
    held = HeldAnswers(groups)
    held.proxies[1].close()
    error = groups.receivers[0].wait(key(1)).error
    assert "the connection to prefill#1/1 at" in error
    check_late_data_is_dropped(groups, held)


def test_an_abort_ends_the_pull_at_every_rank(make_groups: MakeGroups, mode: Mode) -> None:
    groups = make_groups(TWO_OF_3, ONE_OF_3, mode)
    held = HeldAnswers(groups)
    groups.receivers[0].puller.apply(AbortPull(key(1)))
    assert groups.receivers[0].wait(key(1)).error == "aborted"
    check_late_data_is_dropped(groups, held)


def test_a_rank_that_is_silent_ends_the_pull_after_the_timeout(make_groups: MakeGroups, mode: Mode) -> None:
    groups = make_groups(TWO_OF_3, ONE_OF_3, mode, pull_timeout_s=0.3)
    groups.lie(1, lambda answer: [])
    groups.pull(key(1), BLOCKS)
    assert groups.receivers[0].wait(key(1)).error == "no block from prefill#1/1 in 0.3 s"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_dead_already_ends_the_pull(make_groups: MakeGroups, mode: Mode, rank: int) -> None:
    groups = make_groups(TWO_OF_3, ONE_OF_3, mode)
    groups.senders[rank].server.close()
    groups.pull(key(1), BLOCKS)
    assert f"cannot connect to prefill#1/{rank}" in groups.receivers[0].wait(key(1)).error


def test_a_rank_that_refuses_ends_the_pull_and_the_next_one_works(make_groups: MakeGroups, mode: Mode) -> None:
    groups = make_groups(TWO_OF_3, ONE_OF_3, mode)
    (receiver,) = groups.receivers
    start = groups.start(key(1), BLOCKS)
    groups.senders[1].server.apply(Withdraw(key(1)))
    receiver.puller.apply(start)
    assert "r1/0 from prefill#1/1: the source refused" in receiver.wait(key(1)).error
    start = groups.pull(key(2), BLOCKS)
    assert receiver.wait(key(2)).error == ""
    groups.check_arrived(start)
    assert len(receiver.events.finished(key(1))) == 1


def test_a_rank_whose_bytes_are_corrupt_ends_the_pull(make_groups: MakeGroups, mode: Mode) -> None:
    groups = make_groups(TWO_OF_3, ONE_OF_3, mode)
    groups.senders[1].memory.piece(BLOCKS[5], range(2, 3))[HEAD_BYTES - 1] ^= 1
    groups.pull(key(1), BLOCKS)
    error = groups.receivers[0].wait(key(1)).error
    assert f"r1/0 from prefill#1/1: block {BLOCKS[5]} of the source came wrong twice, now corrupt" in error


def test_a_head_that_is_corrupt_fails_only_the_ranks_that_need_it(make_groups: MakeGroups, mode: Mode) -> None:
    groups = make_groups(ONE_OF_3, THREE_OF_3, mode)
    groups.senders[0].memory.piece(BLOCKS[5], range(1, 2))[0] ^= 1
    groups.pull(key(1), BLOCKS)
    errors = [receiver.wait(key(1)).error for receiver in groups.receivers]
    assert (errors[0], errors[2]) == ("", "")
    assert "now corrupt" in errors[1]


def test_a_rank_that_lacks_the_heads_that_its_source_names_refuses_them(make_groups: MakeGroups) -> None:
    groups = make_groups(TWO_OF_3, ONE_OF_3, "tcp")
    shards = (replace(groups.source.shards[0], num_heads=3), groups.source.shards[1])
    groups.source = replace(groups.source, shards=shards)
    groups.pull(key(1), BLOCKS)
    assert "prefill#1/0 has heads 0 to 1, got 0 to 2" in groups.receivers[0].wait(key(1)).error


def test_a_shard_that_names_the_memory_of_another_is_not_read(make_groups: MakeGroups) -> None:
    groups = make_groups(TWO_OF_3, ONE_OF_3, "shm")
    first, second = groups.source.shards
    shards = (first, replace(second, shm_name=first.shm_name, shm_nonce=first.shm_nonce))
    groups.source = replace(groups.source, shards=shards)
    groups.pull(key(1), BLOCKS)
    assert "is not the one of prefill#1/1" in groups.receivers[0].wait(key(1)).error
    groups.receivers[0].check_untouched()


def test_a_group_of_another_layout_is_refused_by_each_rank(make_groups: MakeGroups, mode: Mode) -> None:
    groups = make_groups(TWO_OF_3, THREE_OF_3, mode)
    groups.source = replace(groups.source, layout=replace(layout_of(3), dtype="bfloat16"))
    groups.pull(key(1), BLOCKS)
    for rank, receiver in enumerate(groups.receivers):
        error = receiver.wait(key(1)).error
        assert f"KV layouts differ, decode#1/{rank} != prefill#1: dtype: 'float32' != 'bfloat16'" in error
        receiver.check_untouched()


def test_random_pulls_and_aborts_between_groups_each_finish_once(make_groups: MakeGroups, mode: Mode) -> None:
    groups = make_groups(THREE_OF_3, TWO_OF_3, mode)
    rng = random.Random(1)
    for number in range(100):
        first = rng.randrange(NUM_BLOCKS)
        groups.pull(key(number), range(first, min(NUM_BLOCKS, first + rng.randrange(12))))
        if rng.random() < 0.3:
            rng.choice(groups.receivers).puller.apply(AbortPull(key(rng.randrange(number + 1))))
        if rng.random() < 0.1:
            rng.choice(groups.senders).server.apply(Withdraw(key(rng.randrange(number + 1))))
    for receiver in groups.receivers:
        errors = [receiver.wait(key(number)).error for number in range(100)]
        assert "" in errors
        assert "aborted" in errors
        assert receiver.counter("kv_pulls_failed") == 100 - errors.count("")
        assert receiver.counter("kv_refused_corrupt") == 0
