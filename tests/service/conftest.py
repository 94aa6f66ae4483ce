"""Links for tests, closed at the end."""

from collections.abc import Iterator

import pytest

from tests.service.link_nodes import Node, RawPeer


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Nodes put in here are closed at the end."""
    opened: list[Node] = []
    yield opened
    for node in opened:
        node.links.close()


@pytest.fixture
def raw() -> Iterator[RawPeer]:
    peer = RawPeer()
    yield peer
    peer.close()


@pytest.fixture
def node(nodes: list[Node], raw: RawPeer) -> Node:
    """A node to which the raw peer has a connection."""
    nodes.append(Node("node"))
    raw.connect(nodes[0].address)
    return nodes[0]
