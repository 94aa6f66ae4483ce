"""Which links follow from what names stand for, and what is looked up at all."""

import logging
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.gateway_finder import Addresses, GatewayFinder, LinkChanges, is_name, link_changes, resolve

ADDRESSES = st.frozensets(st.sampled_from(["tcp://10.0.0.1:1", "tcp://10.0.0.2:1", "tcp://[fd00::3]:1"]))
BY_NAME = st.dictionaries(st.sampled_from(["tcp://a:1", "tcp://b:1", "tcp://10.0.0.1:1"]), ADDRESSES)


def addresses(*hosts: str) -> Addresses:
    return frozenset(f"tcp://{host}:1" for host in hosts)


@pytest.mark.parametrize(
    ("known", "found", "changes"),
    [
        ({}, {"a": addresses("x", "y")}, LinkChanges(addresses("x", "y"), addresses())),
        ({"a": addresses("x")}, {"a": addresses("x", "y")}, LinkChanges(addresses("y"), addresses())),
        ({"a": addresses("x", "y")}, {"a": addresses("y")}, LinkChanges(addresses(), addresses("x"))),
        ({"a": addresses("x")}, {}, LinkChanges(addresses(), addresses())),
        (
            {"a": addresses("x"), "b": addresses("x", "y")},
            {"b": addresses("z")},
            LinkChanges(addresses("z"), addresses("y")),
        ),
    ],
    ids=["new", "added", "vanished", "cannot be resolved", "still meant by another name"],
)
def test_links_follow_names(known: dict[str, Addresses], found: dict[str, Addresses], changes: LinkChanges) -> None:
    assert link_changes(known, found) == changes


@given(steps=st.lists(BY_NAME, max_size=8))
def test_links_are_those_of_the_latest_known_addresses(steps: list[dict[str, Addresses]]) -> None:
    known: dict[str, Addresses] = {}
    links: set[str] = set()
    for found in steps:
        changes = link_changes(known, found)
        assert changes.opened.isdisjoint(links)
        assert changes.closed <= links
        links = (links | changes.opened) - changes.closed
        known |= found
        assert links == {address for of_name in known.values() for address in of_name}


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://gateway:5550", True),
        ("tcp://gateway.default.svc.cluster.local:5550", True),
        ("tcp://localhost:5550", True),
        ("tcp://127.0.0.1:5550", False),
        ("tcp://[::1]:5550", False),
        ("tcp://[fe80::1%eth0]:5550", False),
        ("ipc:///run/gateway", False),
        ("ipc://gateway:5550", False),
    ],
)
def test_only_names_are_looked_up(address: str, expected: bool) -> None:
    assert is_name(address) is expected


def test_a_name_stands_for_addresses_of_both_families(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert (host, port) == ("gateway", 5550)
        kind = socket.SOCK_STREAM
        return [
            (socket.AF_INET, kind, 6, "", ("10.0.0.1", 5550)),
            (socket.AF_INET, kind, 6, "", ("10.0.0.2", 5550)),
            (socket.AF_INET6, kind, 6, "", ("fd00::1", 5550, 0, 0)),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert resolve("tcp://gateway:5550") == {"tcp://10.0.0.1:5550", "tcp://10.0.0.2:5550", "tcp://[fd00::1]:5550"}


class Looks:
    """A finder whose looks a test takes one by one."""

    def __init__(self, *gateways: str) -> None:
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.answer: Addresses | OSError | UnicodeError = frozenset()
        self._finder = GatewayFinder(gateways, self.opened.append, self.closed.append, resolve=self._resolve)

    def _resolve(self, name: str) -> Addresses:
        if isinstance(self.answer, OSError | UnicodeError):
            raise self.answer
        return self.answer

    def look(self) -> None:
        self._finder._look()  # pyright: ignore[reportPrivateUsage]


def test_a_name_that_cannot_be_looked_up_changes_nothing_and_is_complained_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    looks = Looks("tcp://gateway:1")
    looks.answer = addresses("10.0.0.1")
    looks.look()
    for error in (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), UnicodeError("label too long"), OSError()):
        looks.answer = error
        looks.look()
    assert (looks.opened, looks.closed) == (["tcp://10.0.0.1:1"], [])
    assert [record.getMessage() for record in caplog.records] == ["cannot look up tcp://gateway:1: Temporary failure"]
    looks.answer = addresses("10.0.0.2")
    looks.look()
    assert (looks.opened, looks.closed) == (["tcp://10.0.0.1:1", "tcp://10.0.0.2:1"], ["tcp://10.0.0.1:1"])


def test_a_literal_address_stays_whatever_names_stand_for() -> None:
    looks = Looks("tcp://gateway:1", "tcp://10.0.0.1:1")
    looks.answer = addresses("10.0.0.1", "10.0.0.2")
    looks.look()
    looks.answer = addresses("10.0.0.3")
    looks.look()
    assert looks.closed == ["tcp://10.0.0.2:1"]
