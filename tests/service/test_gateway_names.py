"""A worker that follows a name over real sockets: gateways come and go behind it."""

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from common.gateway_finder import Addresses, GatewayFinder
from common.links import Links
from tests.service.link_nodes import DEADLINE_S, Node, cancel

NAME = "tcp://gateway:5550"


class Names:
    """A name server whose answer the test chooses. It may be silent, as real ones are."""

    def __init__(self) -> None:
        self.addresses: Addresses = frozenset()
        self.answers = threading.Event()
        self.answers.set()
        self.keeps_waiting = threading.Event()
        self.num_asked = threading.Semaphore(0)

    def resolve(self, name: str) -> Addresses:
        assert name == NAME
        self.num_asked.release()
        if not self.answers.is_set():
            self.keeps_waiting.set()
            self.answers.wait(DEADLINE_S)
        return self.addresses

    def wait_until_followed(self) -> None:
        """The answer of now was taken, and what follows from it has been done."""
        while self.num_asked.acquire(blocking=False):
            pass
        for _ in range(3):
            assert self.num_asked.acquire(timeout=DEADLINE_S)


@pytest.fixture
def names() -> Names:
    return Names()


@pytest.fixture
def worker(nodes: list[Node], names: Names) -> Iterator[Node]:
    worker = Node("worker")
    nodes.append(worker)
    links = worker.links
    finder = GatewayFinder([NAME], links.connect, links.disconnect, resolve=names.resolve, period_s=0.01)
    finder.start()
    yield worker
    finder.close()
    names.answers.set()


def gateway(nodes: list[Node], name: str, host: str) -> Node:
    nodes.append(Node(name, f"tcp://{host}:*"))
    return nodes[-1]


def wait_until_dropped(links: Links, gateway: Node) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while links.send(gateway.id, cancel(1)):
        links.poke_status()
        assert time.monotonic() < deadline_s
        os.sched_yield()


def test_a_worker_joins_every_gateway_behind_a_name_as_they_appear(
    nodes: list[Node], names: Names, worker: Node
) -> None:
    first, second = gateway(nodes, "first", "127.0.0.1"), gateway(nodes, "second", "127.0.0.2")
    names.addresses = frozenset((first.address,))
    worker.wait_for(lambda: worker.knows(first.id))
    assert not worker.knows(second.id)
    names.addresses = frozenset((first.address, second.address))
    worker.wait_for(lambda: worker.knows(second.id))
    for each in (first, second):
        assert worker.links.send(each.id, cancel(7))
        each.wait_number(worker.id, 7)
    assert worker.losses_of(first.id) == []


def test_an_address_that_vanished_is_kept_while_it_answers_and_dropped_when_it_is_down(
    nodes: list[Node], names: Names, worker: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.links.FORGET_S", 0.0)
    first, second = gateway(nodes, "first", "127.0.0.1"), gateway(nodes, "second", "127.0.0.2")
    names.addresses = frozenset((first.address, second.address))
    for each in (first, second):
        worker.wait_for(lambda each=each: worker.knows(each.id))
    names.addresses = frozenset((second.address,))
    names.wait_until_followed()
    assert worker.links.send(first.id, cancel(1))
    first.wait_number(worker.id, 1)
    assert worker.losses_of(first.id) == []
    first.links.close()
    worker.wait_for(lambda: worker.losses_of(first.id))
    wait_until_dropped(worker.links, first)
    assert worker.links.send(second.id, cancel(2))
    second.wait_number(worker.id, 2)


def test_links_go_on_while_a_name_server_is_silent(nodes: list[Node], names: Names, worker: Node) -> None:
    first = gateway(nodes, "first", "127.0.0.1")
    names.addresses = frozenset((first.address,))
    worker.wait_for(lambda: worker.knows(first.id))
    names.answers.clear()
    assert names.keeps_waiting.wait(DEADLINE_S)
    assert worker.links.send(first.id, cancel(3))
    first.wait_number(worker.id, 3)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_link_over_ipv6(nodes: list[Node]) -> None:
    a, b = Node("a", "tcp://[::1]:*"), Node("b")
    nodes += [a, b]
    assert a.address.startswith("tcp://[::1]:")
    b.links.connect(a.address)
    a.wait_for(lambda: a.knows(b.id))
    b.wait_for(lambda: b.knows(a.id))
