"""The address that others are told of a service which listens on every interface."""

import socket

import pytest

from common import own_host as module
from common.own_host import advertised_host, own_host


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Source addresses by destination; there is no other route."""
    found: dict[str, str] = {}
    monkeypatch.setattr(module, "_source_towards", lambda host, port: found.get(host, ""))
    return found


def test_only_a_wildcard_is_replaced(routes: dict[str, str]) -> None:
    routes["gateway"] = "10.0.0.7"
    gateways = ("tcp://gateway:5550",)
    assert advertised_host("tcp://10.0.0.9:*", "", gateways) == ""
    assert advertised_host("ipc:///run/inbox", "", gateways) == ""
    for wildcard in ("tcp://0.0.0.0:*", "tcp://*:5551", "tcp://[::]:5551"):
        assert advertised_host(wildcard, "", gateways) == "10.0.0.7"
    assert advertised_host("tcp://10.0.0.9:*", "other.test", gateways) == "other.test"


def test_the_way_to_a_gateway_decides_before_the_way_to_anybody(routes: dict[str, str]) -> None:
    routes |= {"gateway": "10.0.0.7", "192.0.2.1": "198.51.100.4"}
    assert own_host(("ipc:///run/gateway", "tcp://unknown:5550", "tcp://gateway:5550")) == "10.0.0.7"
    assert own_host() == "198.51.100.4"


def test_a_gateway_on_this_machine_says_nothing_about_the_way_to_others(routes: dict[str, str]) -> None:
    routes |= {"127.0.0.1": "127.0.0.1", "192.0.2.1": "198.51.100.4"}
    assert own_host(("tcp://127.0.0.1:5550",)) == "198.51.100.4"


def test_without_a_route_an_interface_decides(routes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_of_an_interface", lambda: "10.77.0.1")
    assert own_host() == "10.77.0.1"
    monkeypatch.setattr(module, "_of_an_interface", lambda: "")
    assert own_host() == "127.0.0.1"


def test_interfaces_are_asked_for_their_addresses() -> None:
    found = module._of_an_interface()  # pyright: ignore[reportPrivateUsage]
    if found:  # there are machines that have only the loopback
        with socket.socket() as probe:
            probe.bind((found, 0))
    assert not found.startswith("127.")


def test_the_source_towards_the_loopback_is_the_loopback() -> None:
    assert module._source_towards("localhost", 9).startswith("127.")  # pyright: ignore[reportPrivateUsage]
    assert module._source_towards("no-such-host.invalid", 9) == ""  # pyright: ignore[reportPrivateUsage]
