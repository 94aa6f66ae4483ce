"""The address by which others reach this machine, for services that listen on all of its interfaces."""

import fcntl
import logging
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

logger = logging.getLogger(__name__)

WILDCARDS = ("tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:")
LOOPBACK = "127."
_ELSEWHERE = "192.0.2.1"
"""TEST-NET-1 (RFC 5737): looking for a route to it sends nothing."""
_SIOCGIFADDR = 0x8915


def advertised_host(endpoint: str, advertise_host: str, peers: Sequence[str]) -> str:
    """What others are told instead of a wildcard in endpoint; empty: the host that is in it.

    advertise_host: what the operator wants told, whatever is in endpoint
    peers:          addresses such as `tcp://gateway:5550`, which must be able to reach us
    """
    return advertise_host or (own_host(peers) if endpoint.startswith(WILDCARDS) else "")


def own_host(peers: Sequence[str] = ()) -> str:
    """The address from which this machine reaches the peers, or else others, or else that of an interface.

    A peer on this very machine says nothing about the way to the other machines. Blocks while names are resolved.
    """
    places = [peer.removeprefix("tcp://").rpartition(":") for peer in peers if peer.startswith("tcp://")]
    for host, port in [*((host.strip("[]"), int(port)) for host, _, port in places), (_ELSEWHERE, 9)]:
        found = _source_towards(host, port)
        if found and not found.startswith(LOOPBACK):
            return found
    if found := _of_an_interface():
        return found
    logger.warning("this machine has no address but the loopback's: only local peers can reach it")
    return "127.0.0.1"


def _source_towards(host: str, port: int) -> str:
    """The address that packets to a host would come from; empty without a route."""
    with suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
    return ""


def _of_an_interface() -> str:
    """The first interface's IPv4 address that is not the loopback's; empty if there is none. See netdevice(7)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("16s16x", name.encode()))
                if not (host := socket.inet_ntoa(answer[20:24])).startswith(LOOPBACK):
                    return host
    return ""
