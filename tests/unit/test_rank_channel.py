"""What ranks say to each other: whole messages in order, and an end that is seen."""

import socket
from collections.abc import Iterator
from contextlib import closing
from typing import get_args

import pytest

from common.engine.rank_channel import (
    Applied,
    CacheSize,
    Claim,
    Entry,
    Failed,
    Join,
    RankChannel,
    Ready,
    Reply,
    Rest,
    Room,
    Sealed,
    Stop,
    Transfer,
    TransferEvent,
    end_of_rank,
    end_of_rank_0,
    to_plan,
    to_step,
)
from common.engine.step import ScheduledSequence, StepPlan
from common.ids import BlockId, RequestId, SequenceKey
from common.sampling import SamplingParams

Ends = tuple[RankChannel[Entry, Reply], RankChannel[Reply, Entry]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    with closing(end_of_rank_0(ours, 0.05)) as rank_0, closing(end_of_rank(theirs)) as rank:
        yield rank_0, rank


def sequence(is_sampled: bool) -> ScheduledSequence:
    return ScheduledSequence(
        key=SequenceKey(RequestId("r"), 3),
        token_ids=[5, 6],
        start=16,
        block_table=[BlockId(7), BlockId(2)],
        sampling=SamplingParams(max_tokens=9, temperature=1.5, seed=2**64 - 1) if is_sampled else None,
        prompt_token_ids=[1, 2, 3],
        output_token_ids=[4],
        seal=[BlockId(7)],
    )


def test_entries_and_replies_arrive_as_they_were_sent(ends: Ends) -> None:
    rank_0, rank = ends
    entries: list[Entry] = [
        Join(2, "decode#1", 100, 5, 0),
        CacheSize(7),
        to_step(StepPlan((sequence(True), sequence(False)))),
        Claim(),
        Rest(),
        Transfer(b"effect", True),
        Stop(),
    ]
    replies: list[Reply] = [
        Room(7),
        Ready(b"shard"),
        Sealed([(2**64 - 1, 0)]),
        Applied(),
        TransferEvent(b""),
        Failed("why", True),
    ]
    assert {type(entry) for entry in entries} == set(get_args(Entry))
    assert {type(reply) for reply in replies} == set(get_args(Reply))
    for entry in entries:
        rank_0.send(entry)
    for reply in replies:
        rank.send(reply)
    assert [rank.receive() for _ in entries] == entries
    assert [rank_0.receive() for _ in replies] == replies


def test_a_plan_is_the_same_at_every_rank_but_for_what_only_sampling_needs() -> None:
    plan = to_plan(to_step(StepPlan((sequence(True), sequence(False)))))
    for got, is_sampled in zip(plan.sequences, (True, False), strict=True):
        want = sequence(is_sampled)
        assert (got.token_ids, got.start, got.block_table, got.seal) == (
            *(want.token_ids, want.start, want.block_table, want.seal),
        )
        assert (got.sampling is not None) == is_sampled


def test_the_end_of_either_side_is_seen_at_the_other(ends: Ends) -> None:
    rank_0, rank = ends
    rank_0.send(Stop())
    rank_0.hang_up()
    assert rank.receive() == Stop()
    assert rank.receive() is None
    assert rank_0.receive() is None


def test_a_message_that_breaks_off_is_none() -> None:
    ours, theirs = socket.socketpair()
    with closing(end_of_rank(theirs)) as rank, ours:
        ours.sendall(b"\x09\x00\x00\x00half")
        ours.shutdown(socket.SHUT_WR)
        assert rank.receive() is None


def test_who_does_not_write_any_more_still_reads(ends: Ends) -> None:
    rank_0, rank = ends
    rank_0.close_writing()
    assert rank.receive() is None
    rank.send(Applied())
    assert rank_0.receive() == Applied()


def test_what_is_sent_to_nobody_is_an_error(ends: Ends) -> None:
    rank_0, rank = ends
    rank.hang_up()
    with pytest.raises(OSError, match="Broken pipe"):
        rank_0.send(Rest())


def test_who_does_not_read_holds_nobody_up(ends: Ends) -> None:
    rank_0, _ = ends
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        rank_0.send(Transfer(bytes(2**24), False))
