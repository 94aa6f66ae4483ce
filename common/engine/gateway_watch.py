"""Tells a worker's operator which gateways it has joined, and that some are missing. Pure."""

import logging
from collections.abc import Callable

from common.engine.worker import GATEWAY_TIMEOUT_S
from common.peers import LivePeers
from common.service import LinkLost, Received
from common.wire import GatewayStatus

logger = logging.getLogger(__name__)

REPEAT_S = 60.0
"""A gateway that stays away is complained of at most so often."""


class GatewayWatch:
    """What the events of the links say of gateways. Until GATEWAY_TIMEOUT_S have passed none is missed.

    num_expected:  gateways that the worker was told of
    on_missing:    called with the number of those that it has joined when that is less; must not block
    Mutable state: gateways heard of lately, and when to complain next.
    """

    def __init__(self, num_expected: int, on_missing: Callable[[int], None], started_s: float) -> None:
        self._num_expected = num_expected
        self._on_missing = on_missing
        self._joined = LivePeers(GATEWAY_TIMEOUT_S)
        self._next_complaint_s = started_s + GATEWAY_TIMEOUT_S

    def hear(self, event: object, now: float) -> None:
        match event:
            case Received(peer, GatewayStatus(address=address)):
                if peer not in self._joined:
                    logger.info("joined gateway %s at %s", peer, address)
                self._joined.heard(peer, now)
            case LinkLost(peer):
                self._joined.forget(peer)
            case _:
                pass

    def tick(self, now: float) -> None:
        self._joined.pop_silent(now)
        if len(self._joined) < self._num_expected and now >= self._next_complaint_s:
            self._next_complaint_s = now + REPEAT_S
            self._on_missing(len(self._joined))
