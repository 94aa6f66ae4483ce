"""Runs that were measured, simulated again: how far the times of a plan are from those of servers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.figures import RunFigures, summarize
from bench.planning.cluster import Cluster
from bench.planning.deployment import Pools, WorkerModel
from bench.results import Report, Run
from bench.slo import Objectives
from bench.specs import read_specs
from bench.workload import Load, RequestSpec, plan_run
from common.bench_config import BenchRequestOptions, BenchServerOptions, BenchTokenOptions
from common.errors import ConfigError

FIGURES: dict[str, Callable[[RunFigures], float | None]] = {
    "TTFT mean": lambda figures: figures.ttft and figures.ttft.mean,
    "TTFT p50": lambda figures: figures.ttft and figures.ttft.p50,
    "TTFT p90": lambda figures: figures.ttft and figures.ttft.p90,
    "TPOT mean": lambda figures: figures.tpot and figures.tpot.mean,
    "TPOT p50": lambda figures: figures.tpot and figures.tpot.p50,
    "TPOT p90": lambda figures: figures.tpot and figures.tpot.p90,
    "ITL p50": lambda figures: figures.itl and figures.itl.p50,
    "E2E p50": lambda figures: figures.e2e and figures.e2e.p50,
    "E2E p90": lambda figures: figures.e2e and figures.e2e.p90,
}
"""What is compared, in seconds."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Seconds."""

    figure: str
    measured: float
    simulated: float

    @property
    def share(self) -> float:
        """Of what was measured; above 0: the simulation is slower."""
        return self.simulated / self.measured - 1


@dataclass(frozen=True, slots=True)
class RunComparison:
    """One run of a server beside its simulation."""

    server: str
    load: Load
    repeat: int
    measured: RunFigures
    simulated: RunFigures

    def deviations(self) -> list[Deviation]:
        """Of the figures that both have."""
        both = {name: (pick(self.measured), pick(self.simulated)) for name, pick in FIGURES.items()}
        return [Deviation(name, found, ours) for name, (found, ours) in both.items() if found and ours]


class _RunOptions(msgspec.Struct):
    """Of `baton bench run`, as its results repeat them."""

    servers: BenchServerOptions
    requests: BenchRequestOptions
    randomness: BenchTokenOptions


def compare_measured(path: str, pools: Pools, model: WorkerModel) -> list[RunComparison]:
    """The runs of the first server, in their order, on one deployment. Raises: ConfigError."""
    report = _read(path)
    try:
        options = msgspec.convert(report.options, _RunOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--measured: wanted results of `baton bench run`, got {path}: {error}") from error
    specs = read_specs(options.requests, options.randomness.seed)
    if any(spec.text for spec in specs):
        raise ConfigError(f"--measured: wanted prompts of tokens, which a trace or lengths give, got texts in {path}")
    simulation = _Simulation(Cluster(pools, model, options.randomness.seed), options.randomness)
    if options.servers.warmup:
        simulation.run([specs[i % len(specs)] for i in range(options.servers.warmup)], Load("concurrency", 1))
    comparisons: list[RunComparison] = []
    for run in _runs_of_first(report):
        simulated = simulation.run(specs, run.load)
        comparisons.append(RunComparison(run.server, run.load, run.repeat, run.figures, simulated))
    return comparisons


class _Simulation:
    """Runs on one deployment, each with tokens of its own. Mutable: how many there were."""

    def __init__(self, cluster: Cluster, tokens: BenchTokenOptions) -> None:
        self._cluster = cluster
        self._tokens = tokens
        self._num_runs = 0

    def run(self, specs: Sequence[RequestSpec], load: Load) -> RunFigures:
        tokens, salt = self._tokens, self._num_runs
        self._num_runs += 1
        plan = plan_run(specs, load, seed=tokens.seed, vocab_size=tokens.vocab_size, salt=salt)
        return summarize(self._cluster.run(plan), Objectives())


def _runs_of_first(report: Report) -> list[Run]:
    return [run for run in report.runs if run.server == report.servers[0].name]


def _read(path: str) -> Report:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Report)
    except OSError as error:
        raise ConfigError(f"--measured: cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--measured: {path} has no results of `baton bench run`: {error}") from error
