"""What a command measured, as it is written to --json. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.exchange import Server
from bench.figures import RunFigures, summarize
from bench.goodput import Probe
from bench.interleave import METRICS, Comparison, compare
from bench.machine_load import MachineLoad
from bench.measure import RequestFigures
from bench.slo import Objectives, Unloaded
from bench.workload import Load

FORMAT = 1
"""Of the JSON file; rises when a field changes its meaning."""

_CLIENT_LIMIT = 0.7
_SEND_LAG_LIMIT_S = 0.05
_BUSY_LIMIT = 0.2
_CACHED_LIMIT = 0.01


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one server, once.

    machine:  before the run
    cpu_s:    CPU seconds of the client during it
    wall_s:   its length
    groups:   figures of each part of a mixed load
    shares_prefixes:  prompts begin alike by intention
    """

    server: str
    load: Load
    repeat: int
    machine: MachineLoad
    cpu_s: float
    wall_s: float
    figures: RunFigures
    groups: Mapping[str, RunFigures]
    shares_prefixes: bool
    requests: tuple[RequestFigures, ...]

    @property
    def cpu_share(self) -> float:
        """Of one core."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0

    def parts(self) -> dict[str, RunFigures]:
        """All requests, and each group of them, by what to call them."""
        return {str(self.load): self.figures} | {
            f"{self.load}: {name}": figures for name, figures in self.groups.items()
        }


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    wanted:  attainment of a hit
    hit:     the highest rate that attained it; 0: none did
    miss:    the lowest rate that did not; None: all did
    """

    server: str
    repeat: int
    wanted: float
    probes: tuple[Probe, ...]
    hit: float
    miss: float | None


@dataclass(slots=True)
class Report:
    """All of a command's results. Mutable: it grows with each run, so that Ctrl-C loses nothing that was measured."""

    command: str
    options: Mapping[str, object]
    servers: Sequence[Server]
    objectives: Objectives = field(default_factory=Objectives)
    unloaded: Unloaded | None = None
    runs: list[Run] = field(default_factory=list[Run])
    searches: list[SearchResult] = field(default_factory=list[SearchResult])
    comparisons: list[Comparison] = field(default_factory=list[Comparison])
    is_stopped: bool = False
    format: int = FORMAT

    @property
    def num_failed(self) -> int:
        return sum(run.figures.num_failed for run in self.runs)


def group_figures(requests: Sequence[RequestFigures], objectives: Objectives) -> dict[str, RunFigures]:
    """Of each group that has a name."""
    names = dict.fromkeys(request.group for request in requests if request.group)
    return {name: summarize([r for r in requests if r.group == name], objectives) for name in names}


def compare_runs(runs: Sequence[Run], servers: Sequence[Server]) -> list[Comparison]:
    """Every metric of every part of the load, of each further server over the first."""
    figures = {(part, run.server, run.repeat): of_part for run in runs for part, of_part in run.parts().items()}
    parts = dict.fromkeys(part for part, _, _ in figures)
    repeats = sorted({run.repeat for run in runs})
    base = servers[0].name
    found: list[Comparison | None] = []
    for part in parts:
        for server in servers[1:]:
            both = [
                (figures[part, server.name, repeat], figures[part, base, repeat])
                for repeat in repeats
                if (part, server.name, repeat) in figures and (part, base, repeat) in figures
            ]
            for metric, pick in METRICS.items():
                pairs = [(pick(ours) or 0.0, pick(theirs) or 0.0) for ours, theirs in both]
                found.append(compare(metric, part, server.name, base, [pair for pair in pairs if all(pair)]))
    return [comparison for comparison in found if comparison is not None]


def compare_searches(searches: Sequence[SearchResult], servers: Sequence[Server]) -> list[Comparison]:
    """The goodput of each further server over the first's."""
    hits = {(search.server, search.repeat): search.hit for search in searches}
    base = servers[0].name
    found: list[Comparison | None] = []
    for server in servers[1:]:
        pairs = [(hits[server.name, r], hits[base, r]) for name, r in hits if name == base and (server.name, r) in hits]
        found.append(compare("goodput", "search", server.name, base, pairs))
    return [comparison for comparison in found if comparison is not None]


def warnings_of(run: Run) -> list[str]:
    """What makes the figures of a run worth less than they look."""
    figures = run.figures
    warnings: list[str] = []
    if run.cpu_share > _CLIENT_LIMIT:
        warnings.append(f"the client itself was the bottleneck: it used {run.cpu_share:.0%} of a core")
    if figures.max_send_lag_s > _SEND_LAG_LIMIT_S:
        warnings.append(f"the client sent a request {figures.max_send_lag_s * 1000:.0f} ms late")
    if run.machine.cpu_busy is not None and run.machine.cpu_busy > _BUSY_LIMIT:
        warnings.append(f"the machine was {run.machine.cpu_busy:.0%} busy before the run")
    if figures.cached_share > _CACHED_LIMIT and not run.shares_prefixes:
        warnings.append(
            f"the server knew {figures.cached_share:.0%} of the prompts already; another --seed is new to it"
        )
    if figures.mismatches:
        num, first = len(figures.mismatches), figures.mismatches[0]
        warnings.append(f"the usage of {num} of {figures.num_completed} requests is not what was asked: {first}")
    if figures.num_without_usage:
        warnings.append(f"{figures.num_without_usage} streams had no usage: their events were counted as tokens")
    done = [request for request in run.requests if request.is_done]
    num_events, num_tokens = sum(len(r.event_times_s) for r in done), sum(r.num_output for r in done)
    if num_tokens > 1.02 * num_events > 0:
        warnings.append(f"an event had {num_tokens / num_events:.2f} tokens on average: gaps are shared out")
    return warnings


def failure_details(run: Run) -> dict[str, str]:
    """The first detail of each kind of failure."""
    details: dict[str, str] = {}
    for request in run.requests:
        if request.failure in run.figures.failures:
            details.setdefault(request.failure, request.detail)
    return details
