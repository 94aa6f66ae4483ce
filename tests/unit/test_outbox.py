"""Tokens that wait for a gateway which does not read: joined, in order, dropped with their attempt."""

from hypothesis import given
from hypothesis import strategies as st

from common.ids import PeerId, RequestId, SequenceKey
from common.sampling import Finish, FinishReason
from common.service import Send
from common.wire import Tokens, TokensEntry
from decode.outbox import TokenOutbox
from decode.scheduler import Decoded, DecodeSequence
from tests.unit.test_decode_scheduler import request

G0, G1 = PeerId("gateway-0#1"), PeerId("gateway-1#1")


def decoded(name: str, index: int, *, attempt: int = 0, finish: Finish | None = None) -> Decoded:
    """Token `100 + index` of a sequence."""
    message = request(name, num_prompt=4, max_tokens=50, attempt=attempt)
    sequence = DecodeSequence(
        key=SequenceKey(RequestId(name), attempt),
        gateway=G0,
        prompt_token_ids=message.prompt_token_ids,
        output_token_ids=[],
        sampling=message.sampling,
        arrival_s=0.0,
        kv=message.kv,
        hashes=[],
        num_computed=4,
    )
    return Decoded(sequence, index, 100 + index, finish)


def entries(sends: list[Send], gateway: PeerId = G0) -> list[TokensEntry]:
    found = [send.message for send in sends if send.peer == gateway]
    assert len(found) <= 1, "one message a gateway"
    assert all(isinstance(message, Tokens) for message in found)
    return [entry for message in found if isinstance(message, Tokens) for entry in message.entries]


def test_each_gateway_gets_one_message_with_its_own_tokens() -> None:
    outbox = TokenOutbox()
    for gateway, name in ((G0, "a"), (G1, "b"), (G0, "c")):
        outbox.add(gateway, decoded(name, 1))
    sends = outbox.flush()
    assert [entry.request_id for entry in entries(sends, G0)] == ["a", "c"]
    assert [entry.request_id for entry in entries(sends, G1)] == ["b"]
    assert not outbox
    assert outbox.flush() == []


def test_the_end_of_a_sequence_is_kept_when_its_tokens_are_joined() -> None:
    outbox = TokenOutbox()
    outbox.add(G0, decoded("a", 1))
    unsent = entries(outbox.flush())
    outbox.add(G0, decoded("a", 2, finish=Finish(FinishReason.STOP, 7)))
    outbox.put_back(G0, unsent)
    (entry,) = entries(outbox.flush())
    assert (entry.index, entry.token_ids) == (1, (101, 102))
    assert (entry.finish_reason, entry.stop_token_id) == (FinishReason.STOP, 7)


def test_tokens_of_a_cancelled_attempt_and_earlier_ones_are_dropped_and_later_ones_stay() -> None:
    outbox = TokenOutbox()
    for attempt in range(3):
        outbox.add(G0, decoded("a", 1, attempt=attempt))
    outbox.add(G1, decoded("b", 1))
    outbox.forget(SequenceKey(RequestId("a"), 1))
    outbox.forget(SequenceKey(RequestId("b"), 0))
    sends = outbox.flush()
    assert [(entry.request_id, entry.attempt) for entry in entries(sends)] == [("a", 2)]
    assert [send.peer for send in sends] == [G0]


def test_a_lost_gateway_leaves_nothing_behind() -> None:
    outbox = TokenOutbox()
    outbox.add(G0, decoded("a", 1))
    outbox.lost(G0)
    outbox.lost(G1)
    assert not outbox


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "add", "flush", "refuse"])), max_size=40))
def test_every_token_comes_once_and_in_order_however_often_the_link_is_full(steps: list[tuple[str, str]]) -> None:
    outbox = TokenOutbox()
    num_added = dict.fromkeys("abc", 0)
    arrived: dict[str, list[int]] = {name: [] for name in "abc"}

    def flush(is_full: bool) -> None:
        sent = entries(outbox.flush())
        if is_full and sent:
            outbox.put_back(G0, sent)
            return
        for entry in sent:
            assert entry.index == len(arrived[entry.request_id])
            arrived[entry.request_id] += entry.token_ids

    for name, step in steps:
        if step == "add":
            outbox.add(G0, decoded(name, num_added[name]))
            num_added[name] += 1
        else:
            flush(is_full=step == "refuse")
    flush(is_full=False)
    assert arrived == {name: [100 + index for index in range(count)] for name, count in num_added.items()}
