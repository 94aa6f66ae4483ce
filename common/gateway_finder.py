"""Keeps links to gateways whose names may stand for several addresses, and for others as time goes by.

A headless service or a service that is scaled has one name, and behind it as many addresses as there are gateways. So
names are resolved again and again: addresses that appear are connected to; those that vanish are tried no more once
their connection is down, and stay for as long as somebody answers there.
"""

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

RESOLVE_S = 3.0
"""Between two looks at all names: a gateway that is added gets its workers within about so long."""
REPEAT_S = 60.0
"""A name that cannot be resolved is complained of at most so often."""

Addresses = frozenset[str]


@dataclass(frozen=True, slots=True)
class LinkChanges:
    """Addresses to connect to, and those that need not be tried any more."""

    opened: Addresses
    closed: Addresses


def link_changes(known: Mapping[str, Addresses], found: Mapping[str, Addresses]) -> LinkChanges:
    """What follows when names were resolved.

    known: addresses of every gateway so far, by the name that was configured
    found: the same of those that could be resolved now; the others stay where they are, since it is more likely that
           name servers are down than that all of their gateways are
    """
    before, after = _union(known.values()), _union({**known, **found}.values())
    return LinkChanges(opened=after - before, closed=before - after)


def _union(sets: Iterable[Addresses]) -> Addresses:
    return frozenset[str]().union(*sets)


def is_name(address: str) -> bool:
    """Whether the host in it has to be looked up: not so in `ipc://path` and with a literal address."""
    scheme, _, place = address.partition("://")
    host, _, _ = place.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return scheme == "tcp"
    return False


def resolve(address: str) -> Addresses:
    """What `tcp://name:port` stands for, by literal addresses. May block for as long as name servers are silent.

    Raises: OSError, UnicodeError when it stands for nothing.
    """
    name, _, port = address.removeprefix("tcp://").rpartition(":")
    found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    hosts = {(family, str(sockaddr[0])) for family, _, _, _, sockaddr in found}
    return frozenset(f"tcp://{f'[{host}]' if family == socket.AF_INET6 else host}:{port}" for family, host in hosts)


class GatewayFinder:
    """Connects to literal addresses at once, and follows names in a thread of its own, since looking them up blocks.

    connect, disconnect: of the links; any thread, idempotent
    Mutable state, the thread's: addresses by name, and when to complain of which name again.
    """

    def __init__(
        self,
        gateways: Sequence[str],
        connect: Callable[[str], None],
        disconnect: Callable[[str], None],
        *,
        resolve: Callable[[str], Addresses] = resolve,
        period_s: float = RESOLVE_S,
    ) -> None:
        self._literals = [address for address in gateways if not is_name(address)]
        self._names = [address for address in gateways if is_name(address)]
        self._connect = connect
        self._disconnect = disconnect
        self._resolve = resolve
        self._period_s = period_s
        self._known: dict[str, Addresses] = {address: frozenset((address,)) for address in self._literals}
        self._next_complaint_s: dict[str, float] = {}
        self._is_closed = threading.Event()

    def start(self) -> None:
        for address in self._literals:
            self._connect(address)
        if self._names:
            threading.Thread(target=self._follow, name="gateway finder", daemon=True).start()

    def close(self) -> None:
        """Look nothing up any more. Does not wait for a look that is under way."""
        self._is_closed.set()

    def _follow(self) -> None:
        while not self._is_closed.is_set():
            self._look()
            self._is_closed.wait(self._period_s)

    def _look(self) -> None:
        found = {name: addresses for name in self._names if (addresses := self._find(name))}
        changes = link_changes(self._known, found)
        self._known |= found
        for address in sorted(changes.opened):
            logger.info("a gateway should be at %s", address)
            self._connect(address)
        for address in sorted(changes.closed):
            logger.info("no name stands for a gateway at %s any more", address)
            self._disconnect(address)

    def _find(self, name: str) -> Addresses:
        """Empty when it cannot be resolved."""
        try:
            return self._resolve(name)
        except (OSError, UnicodeError) as error:
            now = time.monotonic()
            if now >= self._next_complaint_s.get(name, now):
                self._next_complaint_s[name] = now + REPEAT_S
                logger.warning("cannot look up %s: %s", name, _reason(error))
            return frozenset()


def _reason(error: OSError | UnicodeError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
