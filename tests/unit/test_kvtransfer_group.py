"""Rank 0's side of a group's KV transfer: effects go to all ranks, and one event comes of their several."""

from collections import deque
from collections.abc import Callable

import pytest

from common.errors import WireError
from common.ids import BlockId, PeerId, RequestId, SequenceKey
from common.kv_layout import KVLayout
from common.kv_source import KVDescriptor, KVShard, KVSource
from kvtransfer.group import GroupReceiver, GroupSender, RankSide, decode_from_rank, decode_shard, encode_for_rank
from kvtransfer.loopback import LoopbackSender
from kvtransfer.transport import (
    AbortPull,
    BlockCopy,
    Publish,
    PullFinished,
    ReceiverEffect,
    SendRelease,
    StartPull,
    Withdraw,
)

LAYOUT = KVLayout(
    name="test", dtype="float32", num_layers=1, num_kv_heads=3, head_dim=8, block_size=16, model_hash="test-model"
)
SHARD = KVShard(
    peer=PeerId("prefill#1"), data_address="ipc://here", shm_name="", shm_nonce="", first_head=0, num_heads=3
)
SOURCE = KVSource(peer=PeerId("prefill#1"), layout=LAYOUT, num_blocks=8, shards=(SHARD,))
KEY = SequenceKey(RequestId("r"), 1)
START = StartPull(
    KEY,
    KVDescriptor(source=SOURCE, num_tokens=16, block_ids=(BlockId(3),), checksums=((1, 2, 2**64 - 1),)),
    (BlockCopy(BlockId(3), BlockId(5), (1, 2, 2**64 - 1)),),
)


class Own:
    """Rank 0's own receiver: notes what it is told, and reports what the test says."""

    def __init__(self, deliver: Callable[[PullFinished], None]) -> None:
        self.report = deliver
        self.told: list[ReceiverEffect] = []
        self.is_alive = True

    def apply(self, effect: ReceiverEffect) -> None:
        self.told.append(effect)

    def counters(self) -> dict[str, float]:
        return {"kv_pulls": 1.0}

    def close(self) -> None:
        self.is_alive = False


class Rig:
    """A receiver of three ranks."""

    def __init__(self) -> None:
        self.logged: list[object] = []
        self.events: list[PullFinished] = []
        owns: deque[Own] = deque()

        def make_own(deliver: Callable[[PullFinished], None]) -> Own:
            owns.append(Own(deliver))
            return owns[0]

        self.receiver = GroupReceiver(
            3, make_own, lambda effect: self.logged.append(decode_from_rank(effect)), self.events.append
        )
        self.own = owns[0]

    def finish_at_others(self, *errors: str) -> None:
        for error in errors:
            self.receiver.take_event(encode_for_rank(PullFinished(KEY, error, 10)))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_pull_is_finished_when_it_is_at_all_ranks(rig: Rig) -> None:
    rig.receiver.apply(START)
    assert rig.logged == rig.own.told == [START]
    rig.own.report(PullFinished(KEY, "", 20))
    rig.finish_at_others("")
    assert rig.events == []
    rig.finish_at_others("")
    assert rig.events == [PullFinished(KEY, "", 40)]


def test_the_first_error_ends_a_pull_at_the_other_ranks_and_is_its_error(rig: Rig) -> None:
    rig.receiver.apply(START)
    rig.finish_at_others("rank 1 got a corrupt block")
    assert rig.logged == rig.own.told == [START, AbortPull(KEY)]
    rig.own.report(PullFinished(KEY, "aborted", 0))
    assert rig.events == []
    rig.finish_at_others("aborted")
    assert rig.events == [PullFinished(KEY, "rank 1 got a corrupt block", 20)]
    assert rig.logged == [START, AbortPull(KEY)]


def test_an_error_at_the_last_rank_is_the_error(rig: Rig) -> None:
    rig.receiver.apply(START)
    rig.finish_at_others("", "")
    rig.own.report(PullFinished(KEY, "refused", 0))
    assert rig.events == [PullFinished(KEY, "refused", 20)]


def test_the_same_attempt_can_be_pulled_again(rig: Rig) -> None:
    for _ in range(2):
        rig.receiver.apply(START)
        rig.own.report(PullFinished(KEY, "", 1))
        rig.finish_at_others("", "")
    assert len(rig.events) == 2


def test_a_release_is_sent_once_by_rank_0(rig: Rig) -> None:
    rig.receiver.apply(SendRelease(KEY, SOURCE))
    assert rig.own.told == [SendRelease(KEY, SOURCE)]
    assert rig.logged == []


def test_a_receiver_is_as_alive_as_its_own_and_counts_what_that_does(rig: Rig) -> None:
    assert rig.receiver.is_alive
    assert rig.receiver.counters() == {"kv_pulls": 1.0}
    rig.receiver.close()
    assert not rig.receiver.is_alive


def test_what_is_published_is_so_at_all_ranks_before_anybody_is_told(rig: Rig) -> None:
    ranks = [LoopbackSender(SHARD, lambda event: None) for _ in range(2)]
    sides = [RankSide(rank) for rank in ranks]
    own = LoopbackSender(SHARD, lambda event: None)

    def log(effect: bytes) -> None:
        for side in sides:
            side.apply(effect)

    sender = GroupSender(own, log, log)
    sender.apply(Publish(KEY, (BlockId(1), BlockId(2))))
    assert [one.published for one in (own, *ranks)] == [{KEY: {BlockId(1), BlockId(2)}}] * 3
    sender.apply(Withdraw(KEY))
    assert [one.published for one in (own, *ranks)] == [{}] * 3


def test_a_rank_says_which_heads_it_has() -> None:
    assert decode_shard(RankSide(LoopbackSender(SHARD, lambda event: None), SHARD).shard) == SHARD


@pytest.mark.parametrize("data", [b"", b"\x92\xa1x\xc0", b"\x91\x01", b"\x92\xa7Publish\xc0"])
def test_what_is_no_message_between_ranks_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="a message between ranks"):
        decode_from_rank(data)


def test_a_message_that_does_not_belong_there_is_refused(rig: Rig) -> None:
    with pytest.raises(WireError, match="the end of pulls only, got Withdraw"):
        rig.receiver.take_event(encode_for_rank(Withdraw(KEY)))
    with pytest.raises(WireError, match="a shard of the cache, got Withdraw"):
        decode_shard(encode_for_rank(Withdraw(KEY)))
