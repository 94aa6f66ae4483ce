"""Results as plots, each as PNG and SVG. matplotlib is imported late: it is in the extra `bench`."""

# pyright: basic

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.gateway_figures import GatewayReport, StreamsFigures
from bench.measure import RequestFigures
from bench.results import Report, Run
from common.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_SIZE_INCHES = (8.0, 5.0)
_MAX_GANTT_HEIGHT_INCHES = 20.0
_SHORTEST_MS = 0.01
"""Events that came in one read have no time between them, and a logarithm has no 0."""

_WAITING, _STREAMING = "waiting for the first token", "streaming"


def check_plots(folder: str) -> None:
    """Before hours of measuring. Raises: ConfigError when matplotlib is missing, or the folder cannot be made."""
    check_matplotlib("--plots")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plots: cannot make the folder {folder}: {error.strerror}") from error


def check_matplotlib(switch: str) -> None:
    """Raises: ConfigError when it is missing."""
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ConfigError(f"{switch}: needs matplotlib, of the extra `bench`: pip install -e '.[bench]'") from error


def write_plots(report: Report, folder: str) -> list[Path]:
    """What the report has data for. Returns the files."""
    drawn: dict[str, Figure | None] = {
        "ttft": _cdf(report.runs, "Time to first token, ms", lambda r: [] if r.ttft_s is None else [r.ttft_s]),
        "itl": _cdf(report.runs, "Time between tokens, ms", RequestFigures.gaps_s),
        "throughput_latency": _throughput_latency(report.runs),
        "attainment": _attainment(report),
    }
    drawn |= {f"requests_{_file_name(name)}": _gantt(run) for name, run in _first_runs(report.runs).items()}
    return _save(drawn, folder)


def write_gateway_plots(report: GatewayReport, folder: str) -> list[Path]:
    """CPU per token and latencies over the number of streams. Returns the files."""
    return _save({"gateway": _gateway(report.streams)}, folder)


def _save(drawn: "Mapping[str, Figure | None]", folder: str) -> list[Path]:
    files: list[Path] = []
    for name, figure in drawn.items():
        for suffix in ("png", "svg") if figure else ():
            assert figure is not None
            files.append(Path(folder) / f"{name}.{suffix}")
            figure.savefig(files[-1], dpi=150)
    return files


def _cdf(runs: Sequence[Run], title: str, samples_of: Callable[[RequestFigures], list[float]]) -> "Figure | None":
    """A line for each server and load, over all repeats; time is logarithmic, from _SHORTEST_MS."""
    samples: dict[str, list[float]] = {}
    for run in runs:
        line = samples.setdefault(f"{run.server}, {run.load}", [])
        line += [
            max(_SHORTEST_MS, 1000 * s) for request in run.requests if request.is_done for s in samples_of(request)
        ]
    lines = {label: sorted(line) for label, line in samples.items() if line}
    if not lines:
        return None
    figure, (axes,) = new_figure(1)
    for label, line in lines.items():
        axes.plot(line, [(i + 1) / len(line) for i in range(len(line))], drawstyle="steps-post", label=label)
    axes.set(xlabel=title, ylabel="share of samples", xscale="log", ylim=(0, 1.01))
    label_plainly(axes.xaxis)
    finish(axes)
    return figure


def _throughput_latency(runs: Sequence[Run]) -> "Figure | None":
    """A point for each load, the median of its repeats; the points of a server are joined in the order of loads."""
    if len({run.load for run in runs}) < 2:
        return None
    figure, axes = new_figure(2)
    for server in dict.fromkeys(run.server for run in runs):
        loads = sorted({run.load for run in runs if run.server == server}, key=lambda load: (load.kind, load.value))
        of_load = [[r.figures for r in runs if r.server == server and r.load == load] for load in loads]
        x = [median(f.output_throughput for f in figures) for figures in of_load]
        ttft = [_median_ms([f.ttft.p50 for f in figures if f.ttft]) for figures in of_load]
        tpot = [_median_ms([f.tpot.p50 for f in figures if f.tpot]) for figures in of_load]
        for one, y in zip(axes, (ttft, tpot), strict=True):
            one.plot(x, y, marker="o", label=server)
            for load, *point in zip(loads, x, y, strict=True):
                one.annotate(f"{load.value:.3g}", (point[0], point[1]), textcoords="offset points", xytext=(4, 4))
    kind = runs[0].load.kind
    for one, name in zip(axes, ("TTFT", "TPOT"), strict=True):
        one.set(xlabel=f"output tokens/s (labels: {kind})", ylabel=f"{name} p50, ms")
        one.margins(0.1)
        one.set_ylim(bottom=0)
        finish(one)
    return figure


def _attainment(report: Report) -> "Figure | None":
    """A line for each search, with what it found."""
    if not any(search.probes for search in report.searches):
        return None
    figure, (axes,) = new_figure(1)
    for search in report.searches:
        probes = sorted(search.probes, key=lambda probe: probe.rate)
        label = f"{search.server}, repeat {search.repeat}: {search.hit:.3g} req/s"
        axes.axhline(search.wanted, color="gray", linestyle="--", linewidth=1)
        axes.plot([p.rate for p in probes], [p.attainment for p in probes], marker="o", label=label)
    axes.set(
        xlabel="requests/s", ylabel="share that meets the objectives", ylim=(0, 1.01), title=str(report.objectives)
    )
    finish(axes)
    return figure


def _gateway(all_rows: Sequence[StreamsFigures]) -> "Figure | None":
    """A line for each number of gateways."""
    if not all_rows:
        return None
    figure, (cpu, latency) = new_figure(2)
    for num_gateways in dict.fromkeys(row.num_gateways for row in all_rows):
        rows = [row for row in all_rows if row.num_gateways == num_gateways]
        x, of = [row.num_streams for row in rows], f"{num_gateways} gateway{'s' * (num_gateways > 1)}"
        cpu.plot(x, [row.cpu_per_token_s * 1e6 for row in rows], marker="o", label=of)
        for name, found in (
            ("TTFT added", [row.added_ttft for row in rows]),
            ("delay of a token", [row.token_delay for row in rows]),
        ):
            latency.plot(
                x, [one.p50 * 1000 if one else math.nan for one in found], marker="o", label=f"{of}, {name}, p50"
            )
            latency.plot(
                x, [one.p99 * 1000 if one else math.nan for one in found], marker=".", label=f"{of}, {name}, p99"
            )
    for axes, title in ((cpu, "CPU per streamed token, µs"), (latency, "ms")):
        axes.set(xlabel="streams", ylabel=title)
        axes.set_ylim(bottom=0)
        finish(axes)
    return figure


def _gantt(run: Run) -> "Figure | None":
    """A row for each request, in the order of sending."""
    if not run.requests:
        return None
    height = min(_MAX_GANTT_HEIGHT_INCHES, max(_SIZE_INCHES[1], 0.12 * len(run.requests)))
    figure, (axes,) = new_figure(1, height)
    requests = sorted(run.requests, key=lambda request: request.sent_s)
    phases = [_phases(request) for request in requests]
    for number, name in enumerate(dict.fromkeys(name for row in phases for name, _, _ in row)):
        bars = [(y, start, width) for y, row in enumerate(phases) for label, start, width in row if label == name]
        rows, starts, widths = zip(*bars, strict=True)
        axes.barh(rows, widths, left=starts, height=0.8, label=name, color=f"C{number}")
    failed = [(r.ended_s, y) for y, r in enumerate(requests) if r.failure]
    if failed:
        axes.plot([x for x, _ in failed], [y for _, y in failed], "kx", label="failed")
    axes.set(xlabel="s", ylabel="request", title=f"{run.server}, {run.load}")
    axes.invert_yaxis()
    finish(axes)
    return figure


def _phases(request: RequestFigures) -> list[tuple[str, float, float]]:
    """(name, start, length) in seconds: the server's own phases, one after another, or what a client can tell."""
    if request.phases_s:
        start_s = request.sent_s
        phases: list[tuple[str, float, float]] = []
        for name, length_s in request.phases_s.items():
            phases.append((name.removesuffix("_s"), start_s, length_s))
            start_s += length_s
        return phases
    first_s = request.event_times_s[0] if request.event_times_s else request.ended_s
    return [
        (_WAITING, request.sent_s, first_s - request.sent_s),
        (_STREAMING, first_s, request.ended_s - first_s),
    ]


def _first_runs(runs: Sequence[Run]) -> dict[str, Run]:
    """The first run of each server and load."""
    found: dict[str, Run] = {}
    for run in runs:
        found.setdefault(f"{run.server}_{run.load}", run)
    return found


def new_figure(num_axes: int, height: float = _SIZE_INCHES[1]) -> "tuple[Figure, list[Axes]]":
    """Axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_SIZE_INCHES[0] * math.sqrt(num_axes), height), layout="constrained")
    return figure, list(figure.subplots(1, num_axes, squeeze=False)[0])


def label_plainly(axis: "Axis") -> None:
    """Of a logarithmic axis: `200`, not `2 × 10²`."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def finish(axes: "Axes") -> None:
    """Grid and legend."""
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize="small")


def _median_ms(seconds: Sequence[float]) -> float:
    return 1000 * median(seconds) if seconds else math.nan


def _file_name(text: str) -> str:
    return "".join(char if char.isalnum() or char in "-." else "_" for char in text)
