"""One request as it went over HTTP, and a run of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.sse import Chunk
from bench.workload import PlannedRequest
from common.errors import BatonError

STOPPED = "stopped"
"""The failure of a request that Ctrl-C ended; it is not the server's."""


class BenchError(BatonError):
    """A server cannot be reached, or is not one that can be measured."""


@dataclass(frozen=True, slots=True)
class Server:
    """name: in results.  model: to ask for."""

    name: str
    url: str
    model: str


@dataclass(slots=True)
class Exchange:
    """One request as it went. Mutable: it is filled while the request runs. Times are time.perf_counter's.

    status:   of HTTP; 0 until there is one
    failure:  kind, if the conversation broke
    """

    request: PlannedRequest
    sent_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    failure: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a plan. exchanges: those that were begun.  cpu_s: seconds of CPU this process used meanwhile."""

    exchanges: Sequence[Exchange]
    started_s: float
    ended_s: float
    cpu_s: float
