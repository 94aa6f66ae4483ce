"""What a running gateway says of itself and of its workers."""

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import httpx

REST_S = 20.0
"""Statuses come twice a second, so what the workers hold is known to the gateway a little later."""


class Front:
    """A gateway by its URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics").text

    def metric(self, name: str, label: str = "") -> float:
        """The sum over the series of this name that have the label, such as `worker="decode-0"`."""
        series = re.findall(rf"^{re.escape(name)}\{{([^}}]*)\}} (\S+)$", self.metrics(), re.MULTILINE)
        values = [float(value) for labels, value in series if label in labels]
        assert values, f"no series {name} with {label!r}"
        return sum(values)

    def counters(self, worker: str) -> dict[str, float]:
        """What /metrics says of a worker, by short name; empty while it is not there."""
        pattern = rf'^baton_worker_(\w+)\{{[^}}]*worker="{worker}"[^}}]*\}} (\S+)$'
        return {name: float(value) for name, value in re.findall(pattern, self.metrics(), re.MULTILINE)}

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float = REST_S) -> None:
        """Ask again with every status until it holds. While the gateway is not there, nothing does."""
        deadline = time.monotonic() + timeout_s
        while True:
            with suppress(httpx.TransportError):
                if is_so():
                    return
            assert time.monotonic() < deadline, f"not so after {timeout_s} s"
            threading.Event().wait(0.2)

    def wait_until_at_rest(self, num_workers: int = 2, timeout_s: float = REST_S) -> None:
        """So many workers are there, and none owns a block."""

        def is_at_rest() -> bool:
            owned = re.findall(r"^baton_worker_owned_blocks\{[^}]*\} (\S+)$", self.metrics(), re.MULTILINE)
            return len(owned) == num_workers and not any(map(float, owned))

        self.wait_until(is_at_rest, timeout_s)
