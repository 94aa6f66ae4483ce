"""What peers may ask of links: where they may live, how many they may be, and what becomes of links that break."""

import threading

import pytest

from common.ids import PeerId
from common.service import LinkEvent, Received
from common.wire import GatewayStatus, KVRelease
from tests.service.link_nodes import DEADLINE_S, Node, RawPeer, cancel, connect


def test_data_messages_and_bad_addresses_are_refused(node: Node, raw: RawPeer) -> None:
    raw.send(node.id, 1, KVRelease(request_id=cancel(1).request_id, attempt=1))
    for address in ("nonsense", "inproc://x", "tcp://nonsense", "ipc://"):
        raw.send(node.id, 0, GatewayStatus(name="raw", address=address, leases=()))
    raw.send(node.id, 1, cancel(1))
    node.wait_number(raw.id, 1)
    assert node.links.counters()["links_refused_misplaced"] == 1
    assert node.links.counters()["links_refused_malformed"] == 4
    assert node.order_from(raw.id) == [1]
    assert sum(isinstance(event, Received) for event in node.events) == 1, "what is refused is not heard"


def introduce_strangers(raw: RawPeer, count: int) -> None:
    """Valid statuses of as many peers, at addresses where nobody listens."""
    own = raw.id
    for number in range(count):
        raw.id = PeerId(f"stranger-{number}#1")
        raw.send(PeerId(""), 0, GatewayStatus(name="stranger", address=f"ipc:///nowhere/{number}", leases=()))
    raw.id = own


def test_peers_beyond_the_limit_are_refused_and_all_others_go_on(
    nodes: list[Node], raw: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.links.max_connections", lambda: 5)
    hub, early, configured = nodes[:] = [Node("hub"), Node("early"), Node("configured")]
    raw.connect(hub.address)
    connect(early, hub)
    introduce_strangers(raw, 10)
    raw.send_status(PeerId(""))
    raw.send(hub.id, 1, cancel(1))
    hub.wait_number(raw.id, 1)
    assert hub.links.counters()["links_refused_surplus"] == 7
    assert not hub.links.send(raw.id, cancel(2))
    connect(hub, configured)
    for other in (early, configured):
        hub.send_all(other.id, range(1, 4))
        other.wait_number(hub.id, 3)


def test_hundreds_of_addresses_keep_nobody_from_joining_or_closing(node: Node, raw: RawPeer) -> None:
    introduce_strangers(raw, 400)
    raw.send_status(PeerId(""))
    assert raw.receive(GatewayStatus).sender == node.id
    assert node.links.is_alive
    assert node.links.counters()["links_refused_surplus"] == 0
    closing = threading.Thread(target=node.links.close, daemon=True)
    closing.start()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()


def test_links_whose_thread_breaks_are_dead_and_can_be_closed(
    node: Node, raw: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_died = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: has_died.set())
    introduce_strangers(raw, 3)

    def break_down(event: LinkEvent) -> None:
        raise ValueError("a bug")

    node.links._receiver._deliver = break_down  # pyright: ignore[reportPrivateUsage]
    raw.send_status(PeerId(""))
    assert has_died.wait(DEADLINE_S)
    assert not node.links.is_alive
    node.links.close()
