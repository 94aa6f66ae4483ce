"""Links over real sockets: order, introduction, loss, restart, bounds."""

import logging
import os
import random
import threading
import time
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.ids import PeerId, RequestId
from common.link_out import MAX_OUTBOX
from common.links import STATUS_S, Links
from common.wire import Buffer, Cancel, Envelope, GatewayStatus, LinkBroken, encode
from tests.service.link_nodes import DEADLINE_S, Node, RawPeer, Relay, cancel, connect

ENDPOINTS = ["tcp://127.0.0.1:*", "ipc://*"]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_messages_of_one_link_arrive_in_order(nodes: list[Node], endpoint: str) -> None:
    a, b = nodes[:] = [Node("a", endpoint), Node("b", endpoint)]
    connect(a, b)
    a.send_all(b.id, range(1, 501))
    b.send_all(a.id, range(1, 501))
    b.wait_number(a.id, 500)
    a.wait_number(b.id, 500)
    assert b.numbers_from(a.id) == list(range(1, 501))
    assert a.numbers_from(b.id) == list(range(1, 501))


def test_each_thread_s_messages_keep_their_order(nodes: list[Node]) -> None:
    a, b = nodes[:] = [Node("a"), Node("b")]
    connect(a, b)
    spans = [range(start, start + 200) for start in (1000, 2000, 3000, 4000)]
    threads = [threading.Thread(target=a.send_all, args=(b.id, span)) for span in spans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    b.wait_for(lambda: len(b.numbers_from(a.id)) == 800)
    numbers = b.numbers_from(a.id)
    for span in spans:
        assert [number for number in numbers if number in span] == list(span)


def test_a_message_to_an_unknown_peer_is_not_taken(nodes: list[Node]) -> None:
    nodes.append(Node("a"))
    assert not nodes[0].links.send(PeerId("nobody#1"), cancel(1))


def test_statuses_go_on_by_themselves_and_at_once_when_poked(nodes: list[Node]) -> None:
    a, b = nodes[:] = [Node("a"), Node("b")]
    connect(a, b)
    made = a.num_statuses_made
    b.wait_for(lambda: a.num_statuses_made >= made + 2)
    started_s = time.monotonic()
    for _ in range(20):
        num_received = len(b.events)
        a.links.poke_status()
        b.wait_for(lambda seen=num_received: len(b.events) > seen)
    assert time.monotonic() - started_s < 20 * STATUS_S / 2


def test_peers_know_each_other_as_soon_as_they_are_connected(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No periodic status is needed, so a worker gets requests at once."""
    monkeypatch.setattr("common.links.STATUS_S", 1_000_000.0)
    gateway, worker = nodes[:] = [Node("gateway"), Node("worker")]
    connect(worker, gateway)
    gateway.send_all(worker.id, range(1, 3))
    worker.wait_number(gateway.id, 2)


def test_many_peers_share_one_inbox(nodes: list[Node]) -> None:
    hub, *others = nodes[:] = [Node(name) for name in ("hub", "a", "b", "c", "d")]
    for other in others:
        connect(other, hub)
        other.send_all(hub.id, range(1, 51))
    for other in others:
        hub.wait_number(other.id, 50)
        assert hub.order_from(other.id) == list(range(1, 51))


def test_a_full_link_refuses_and_what_it_took_arrives(nodes: list[Node], node: Node) -> None:
    slow = RawPeer("slow#1", max_unread=1)
    try:
        slow.connect(node.address)
        slow.send_status(PeerId(""))
        node.wait_for(lambda: node.knows(slow.id))
        padded = Cancel(request_id=RequestId("r" * 100_000), attempt=1)
        num_taken = 0
        while node.links.send(slow.id, padded):
            num_taken += 1
        assert MAX_OUTBOX <= num_taken < 10 * MAX_OUTBOX
        seqs = [slow.receive(Cancel).seq for _ in range(num_taken)]
        assert seqs == list(range(1, num_taken + 1))
    finally:
        slow.close()


def test_a_restart_at_the_same_address_is_another_peer(nodes: list[Node]) -> None:
    worker, first = nodes[:] = [Node("worker"), Node("gateway")]
    connect(worker, first)
    worker.send_all(first.id, range(1, 4))
    first.wait_number(worker.id, 3)
    first.links.close()
    worker.wait_for(lambda: worker.losses_of(first.id))
    second = Node("gateway", first.address, incarnation=2)
    nodes.append(second)
    worker.wait_for(lambda: worker.knows(second.id))
    worker.send_all(second.id, range(1, 4))
    second.wait_number(worker.id, 3)
    assert second.order_from(worker.id) == [1, 2, 3]
    assert not worker.links.send(first.id, cancel(9))
    assert worker.links.counters()["links_lost_incarnation"] == 1


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "ipc://{tmp_path}/worker"])
def test_who_speaks_from_an_address_that_was_given_up_for_long_is_connected_to_at_once(
    nodes: list[Node], endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RECONNECT_MS", "RECONNECT_MAX_MS"):
        monkeypatch.setattr(f"common.link_socket.{name}", 3_600_000)
    gateway, first = nodes[:] = [Node("gateway"), Node("worker", endpoint.format(tmp_path=tmp_path))]
    connect(gateway, first)
    first.links.close()
    gateway.wait_for(lambda: gateway.losses_of(first.id))
    second = Node("worker", first.address, incarnation=2)
    nodes.append(second)
    second.links.connect(gateway.address)
    gateway.wait_for(lambda: gateway.knows(second.id))
    gateway.send_all(second.id, range(1, 4))
    second.wait_number(gateway.id, 3)
    second.links.close()
    assert gateway.wait_for(lambda: gateway.losses_of(second.id)) == ["the connection broke"]


@pytest.mark.parametrize("place", ["tcp://nobody.invalid:1", "tcp://127.0.0.1:1", "ipc:///no/such/folder/socket"])
def test_statuses_from_where_nobody_answers_disturb_nobody(
    nodes: list[Node], node: Node, raw: RawPeer, place: str
) -> None:
    other = Node("other")
    nodes.append(other)
    connect(node, other)
    for _ in range(100):
        raw.send(PeerId(""), 0, GatewayStatus(name="raw", address=place, leases=()))
    node.wait_for(lambda: node.knows(raw.id))
    node.send_all(other.id, range(1, 4))
    other.wait_number(node.id, 3)
    assert node.links.is_alive


def test_a_superseded_incarnation_is_not_heard_any_more(node: Node, raw: RawPeer) -> None:
    raw.send_status(PeerId(""))
    node.wait_for(lambda: node.knows(raw.id))
    old, raw.id = raw.id, PeerId("raw#2")
    raw.send_status(PeerId(""))
    node.wait_for(lambda: node.losses_of(old))
    raw.id = old
    raw.send(node.id, 1, cancel(1))
    raw.send_status(node.id, 1)
    raw.id = PeerId("raw#2")
    raw.send(node.id, 1, cancel(2))
    node.wait_number(raw.id, 2)
    assert node.numbers_from(old) == []
    assert node.links.counters()["links_refused_superseded"] == 2


def test_what_is_addressed_to_another_incarnation_is_dropped(node: Node, raw: RawPeer) -> None:
    raw.send(PeerId("node#0"), 1, cancel(1))
    raw.send(PeerId(""), 1, cancel(2))
    raw.send_status(PeerId("node#0"))
    raw.send(node.id, 1, cancel(3))
    node.wait_number(raw.id, 3)
    assert node.order_from(raw.id) == [3]
    assert node.links.counters()["links_refused_misaddressed"] == 3


def test_duplicates_are_dropped(node: Node, raw: RawPeer) -> None:
    for seq, number in [(1, 1), (1, 1), (2, 2), (1, 1), (2, 2), (3, 3)]:
        raw.send(node.id, seq, cancel(number))
    node.wait_number(raw.id, 3)
    assert node.order_from(raw.id) == [1, 2, 3]
    assert node.links.counters()["links_refused_duplicate"] == 3


def test_a_gap_is_one_loss_and_the_peer_is_told(node: Node, raw: RawPeer) -> None:
    raw.send_status(PeerId(""))
    for seq in (1, 4, 5):
        raw.send(node.id, seq, cancel(seq))
    node.wait_number(raw.id, 5)
    assert node.order_from(raw.id) == [1, "lost", 4, 5]
    assert raw.receive_complaint().last_missing == 3


def test_a_first_message_that_is_not_number_one_is_a_gap(node: Node, raw: RawPeer) -> None:
    raw.send(node.id, 7, cancel(7))
    node.wait_number(raw.id, 7)
    assert node.order_from(raw.id) == ["lost", 7]


def test_a_peer_whose_first_status_is_missing_is_told_of_the_gap_when_its_address_is_known(
    node: Node, raw: RawPeer
) -> None:
    raw.send(node.id, 7, cancel(7))
    node.wait_number(raw.id, 7)
    raw.send_status(node.id, 7)
    assert raw.receive_complaint().last_missing == 6


def test_a_status_shows_that_the_last_messages_are_missing(node: Node, raw: RawPeer) -> None:
    raw.send_status(PeerId(""))
    raw.send(node.id, 1, cancel(1))
    raw.send_status(node.id, 1)
    raw.send_status(node.id, 3)
    raw.send_status(node.id, 3)
    raw.send(node.id, 4, cancel(4))
    node.wait_number(raw.id, 4)
    assert node.order_from(raw.id) == [1, "lost", 4]
    assert raw.receive_complaint().last_missing == 3


def test_a_peer_that_misses_messages_is_lost(nodes: list[Node], node: Node, raw: RawPeer) -> None:
    raw.send_status(PeerId(""))
    node.wait_for(lambda: node.knows(raw.id))
    node.send_all(raw.id, range(1, 3))
    assert [raw.receive(Cancel).seq for _ in range(2)] == [1, 2], "nobody misses what was not sent yet"
    raw.send(node.id, 1, LinkBroken(reason="2 is missing", last_missing=2))
    node.wait_for(lambda: node.losses_of(raw.id))
    raw.send(node.id, 2, LinkBroken(reason="2 is missing", last_missing=2))
    raw.send(node.id, 3, cancel(3))
    node.wait_number(raw.id, 3)
    assert node.order_from(raw.id) == ["lost", 3], "what is known to be lost is not lost again"


def test_a_broken_connection_is_one_loss_on_each_side(nodes: list[Node]) -> None:
    a, b = nodes[:] = [Node("a"), Node("b")]
    relay = Relay(b.address)
    b.address = relay.address  # what b advertises
    try:
        connect(a, b)
        a.send_all(b.id, range(1, 4))
        b.wait_number(a.id, 3)
        relay.swallow()
        a.send_all(b.id, range(4, 7))
        assert relay.num_swallowed.acquire(timeout=DEADLINE_S)
        relay.cut()
        a.wait_for(lambda: a.losses_of(b.id))
        a.send_all(b.id, range(7, 10))
        b.wait_number(a.id, 9)
        a.links.poke_status()
        b.send_all(a.id, range(1, 4))
        a.wait_number(b.id, 3)
        assert b.order_from(a.id) == [1, 2, 3, "lost", 7, 8, 9]
        assert a.order_from(b.id) == ["lost", 1, 2, 3]
    finally:
        relay.close()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_breaks_nothing_is_repeated_and_every_loss_is_told(nodes: list[Node], seed: int) -> None:
    """b takes an increasing subset of what a sends, and a hole only ever comes with a loss on both sides."""
    rng = random.Random(seed)
    a, b = nodes[:] = [Node("a"), Node("b")]
    relay = Relay(b.address)
    b.address = relay.address
    try:
        connect(a, b)
        number = 0
        for _ in range(8):
            number += 1
            a.send_all(b.id, range(number, number + 1))
            b.wait_number(a.id, number)  # so the connection is up again
            if is_swallowing := rng.random() < 0.5:
                relay.swallow()
            for _ in range(rng.randrange(1, 40)):
                number += a.links.send(b.id, cancel(number + 1))
            if is_swallowing:
                assert relay.num_swallowed.acquire(timeout=DEADLINE_S)
            num_losses = len(a.losses_of(b.id))
            relay.cut()
            a.wait_for(lambda seen=num_losses: len(a.losses_of(b.id)) > seen)
        a.send_all(b.id, range(number + 1, number + 2))
        b.wait_number(a.id, number + 1)
        assert len(b.losses_of(a.id)) == len(a.losses_of(b.id)) == 8
    finally:
        relay.close()
    previous = 0
    for item in b.order_from(a.id):
        if item == "lost":
            previous = -1
        else:
            assert isinstance(item, int)
            assert item == previous + 1 or previous == -1, b.order_from(a.id)
            previous = item
    assert b.numbers_from(a.id) == sorted(set(b.numbers_from(a.id)))


def test_malformed_frames_are_counted_and_logged_at_most_once_a_second(
    node: Node, raw: RawPeer, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(0)
    good = bytes(encode(Envelope(raw.id, node.id, 1, cancel(1)))[0])
    headers = [b"", good[:-1], good + b"x", b"\xff" * 100, *(rng.randbytes(rng.randrange(200)) for _ in range(500))]
    bad: list[list[Buffer]] = [[good, b"buffer"]]
    bad.extend([header] for header in headers)
    with caplog.at_level(logging.WARNING, "common"):
        for frames in bad:
            raw.send_frames(frames)
        raw.send(node.id, 1, cancel(1))
        node.wait_number(raw.id, 1)
    assert node.links.counters()["links_refused_malformed"] == len(bad)
    assert 1 <= len(caplog.records) <= 5
    assert node.order_from(raw.id) == [1]


def test_an_inbox_that_cannot_be_bound_is_an_operator_s_error(nodes: list[Node]) -> None:
    nodes.append(Node("a"))
    with pytest.raises(ConfigError, match="cannot listen on"):
        Node("b", nodes[0].address)


def test_a_wildcard_host_is_replaced_by_one_that_others_can_reach() -> None:
    def make_status(peer: PeerId | None) -> GatewayStatus:
        raise AssertionError("nobody is there")

    for advertise_host, wanted in [("example.test", "tcp://example.test:"), (None, "tcp://")]:
        links = Links(PeerId("a#1"), "tcp://0.0.0.0:*", advertise_host, make_status, lambda event: None)
        links.start()
        links.close()
        assert links.address.startswith(wanted)
        assert "0.0.0.0" not in links.address


def test_closed_links_leave_no_thread_and_no_descriptor() -> None:
    def open_and_close() -> None:
        a, b = Node("a"), Node("b")
        connect(a, b)
        a.send_all(b.id, range(1, 10))
        a.links.close()
        b.links.close()
        a.links.close()
        assert not a.links.is_alive

    open_and_close()
    num_threads, num_descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        open_and_close()
    assert threading.active_count() == num_threads
    assert len(os.listdir("/proc/self/fd")) <= num_descriptors


def test_closing_with_time_to_flush_sends_all_that_was_taken(node: Node) -> None:
    slow = RawPeer("slow#1", max_unread=1)
    try:
        slow.connect(node.address)
        slow.send_status(PeerId(""))
        node.wait_for(lambda: node.knows(slow.id))
        for number in range(200):  # more than the kernel's buffers take
            assert node.links.send(slow.id, Cancel(request_id=RequestId("r" * 100_000), attempt=number))
        closer = threading.Thread(target=node.links.close, args=(DEADLINE_S,))
        closer.start()
        assert [slow.receive(Cancel).seq for _ in range(200)] == list(range(1, 201))
        closer.join()
    finally:
        slow.close()


def test_closing_does_not_wait_for_a_peer_that_does_not_read(node: Node) -> None:
    slow = RawPeer("slow#1", max_unread=1)
    try:
        slow.connect(node.address)
        slow.send_status(PeerId(""))
        node.wait_for(lambda: node.knows(slow.id))
        while node.links.send(slow.id, Cancel(request_id=RequestId("r" * 100_000), attempt=1)):
            assert node.links.is_alive
        started_s = time.monotonic()
        node.links.close(flush_s=0.1)
        assert time.monotonic() - started_s < DEADLINE_S / 2
    finally:
        slow.close()


def test_a_peer_that_left_for_good_loses_its_socket(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.links.FORGET_S", 0.0)
    a, b = nodes[:] = [Node("a"), Node("b")]
    connect(a, b)
    assert b.links.send(a.id, cancel(1))
    a.links.close()
    b.wait_for(lambda: b.losses_of(a.id))
    b.links.poke_status()
    deadline_s = time.monotonic() + DEADLINE_S
    while b.links.send(a.id, cancel(2)):
        assert time.monotonic() < deadline_s
        os.sched_yield()
