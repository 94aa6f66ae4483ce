"""Sequence numbers of a link, under any loss and repetition."""

from hypothesis import given
from hypothesis import strategies as st

from common.link_numbers import Arrival, LinkNumbers


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40))))
def test_whatever_arrives_numbers_taken_only_grow_and_every_hole_is_a_gap(arrivals: list[tuple[bool, int]]) -> None:
    numbers = LinkNumbers()
    for is_status, seq in arrivals:
        before = numbers.last_received
        arrival = numbers.take_status(seq) if is_status else numbers.take_message(seq)
        num_missing = numbers.last_received - before - (not is_status)
        match arrival:
            case Arrival.DUPLICATE:
                assert numbers.last_received == before
                assert seq < before or (seq == before and not is_status)
            case Arrival.NEXT:
                assert numbers.last_received == seq
                assert num_missing == 0
            case Arrival.GAP:
                assert numbers.last_received == seq
                assert num_missing > 0


@given(st.lists(st.sampled_from(["send", "lose", "status", "break"]), max_size=60))
def test_a_receiver_notices_every_loss_at_the_next_status(actions: list[str]) -> None:
    """lose: a message vanishes on the way. break: the connection breaks, with two messages waiting."""
    ours, theirs = LinkNumbers(), LinkNumbers()
    is_hole = False
    for action in [*actions, "status"]:
        if action == "send":
            ours.last_sent += 1
            assert theirs.take_message(ours.last_sent) is (Arrival.GAP if is_hole else Arrival.NEXT)
            is_hole = False
        elif action == "lose":
            ours.last_sent += 1
            is_hole = True
        elif action == "status":
            assert theirs.take_status(ours.last_sent) is (Arrival.GAP if is_hole else Arrival.NEXT)
            is_hole = False
        else:
            ours.void_connection(num_unsent=2)
            is_hole = True
    assert theirs.last_received == ours.last_sent


def test_a_complaint_about_what_was_given_up_is_known() -> None:
    numbers = LinkNumbers(last_sent=5)
    assert not numbers.is_known_lost(5)
    numbers.void_connection(num_unsent=0)
    assert numbers.is_known_lost(5)
    assert numbers.is_known_lost(6)
    assert not numbers.is_known_lost(7)
    assert not numbers.is_known_lost(0), "0 says that the peer does not know"
