"""What a worker says of its gateways: who was joined, and that some are missing, neither too often nor too early."""

import logging

import pytest

from common.engine.gateway_watch import REPEAT_S, GatewayWatch
from common.engine.worker import GATEWAY_TIMEOUT_S
from common.ids import PeerId
from common.service import LinkLost, Received
from common.wire import GatewayStatus

STATUS_S = 0.5


class Watched:
    """A watch on a virtual clock, and the moments at which it complained, each with the number of joined gateways."""

    def __init__(self, num_expected: int = 1) -> None:
        self.now = 0.0
        self.complaints: list[tuple[float, int]] = []
        self.watch = GatewayWatch(num_expected, lambda joined: self.complaints.append((self.now, joined)), self.now)

    def live(self, duration_s: float, *gateways: str) -> None:
        """These gateways are there all the time."""
        until_s = self.now + duration_s
        while self.now < until_s:
            for name in gateways:
                status = GatewayStatus(name=name, address=f"sim://{name}", leases=())
                self.watch.hear(Received(PeerId(name), status), self.now)
            self.watch.tick(self.now)
            self.now += STATUS_S


def test_a_gateway_that_stays_away_is_missed_after_a_moment_and_then_once_a_minute() -> None:
    watched = Watched()
    watched.live(2 * REPEAT_S + GATEWAY_TIMEOUT_S + 1)
    assert watched.complaints == [(GATEWAY_TIMEOUT_S + number * REPEAT_S, 0) for number in range(3)]


def test_a_gateway_that_comes_soon_is_not_missed_and_said_to_be_joined_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched()
    watched.live(GATEWAY_TIMEOUT_S - 1)
    watched.live(1000, "g#1")
    assert watched.complaints == []
    assert [record.getMessage() for record in caplog.records] == ["joined gateway g#1 at sim://g#1"]


def test_of_several_gateways_each_is_expected() -> None:
    watched = Watched(num_expected=2)
    watched.live(GATEWAY_TIMEOUT_S + 1, "g#1")
    watched.live(1000, "g#1", "h#1")
    assert watched.complaints == [(GATEWAY_TIMEOUT_S, 1)]


def test_a_gateway_that_goes_is_missed_and_joined_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched()
    watched.live(100, "g#1")
    watched.live(GATEWAY_TIMEOUT_S + 1)
    assert len(watched.complaints) == 1
    watched.live(1, "g#1")
    watched.watch.hear(LinkLost(PeerId("g#1"), "broken"), watched.now)
    watched.live(1, "g#2")
    joined = [record.getMessage().split()[2] for record in caplog.records]
    assert joined == ["g#1", "g#1", "g#2"]
    assert len(watched.complaints) == 1
