"""Results on the terminal."""

from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table

from bench.figures import Distribution, RunFigures
from bench.gateway_figures import GatewayReport
from bench.interleave import Comparison
from bench.results import Report, Run, SearchResult, failure_details, warnings_of
from bench.terminal import new_table, open_console

_STOPPED = "Stopped: these are the results so far."


def print_report(report: Report) -> None:
    console = open_console()
    if report.unloaded:
        unloaded = report.unloaded
        name = escape(report.servers[0].name)
        console.print(f"Unloaded {name}: TTFT {_ms(unloaded.ttft_s)} ms, TPOT {_ms(unloaded.tpot_s)} ms")
    if report.objectives:
        console.print(f"Objectives: {report.objectives}")
    if report.runs:
        console.print(_throughputs(report.runs), _latencies(report.runs))
    if report.searches:
        console.print(_probes(report.searches), _goodputs(report.searches))
    if report.comparisons:
        console.print(_comparisons(report.comparisons))
    for line in dict.fromkeys(line for run in report.runs for line in _remarks(run)):
        console.print(escape(line))
    if report.is_stopped:
        console.print(_STOPPED)


def print_gateway_report(report: GatewayReport) -> None:
    console = open_console()
    console.print(f"Idle gateway: {report.idle_cpu_share:.1%} of a core")
    numbers = ("requests", "tok/s", "CPU µs/token", "gateways' CPU", "client and workers' CPU")
    latencies = ("TTFT added p50", "p99", "token delay p50", "p99", "gap added p99")
    table = new_table("Gateway; latencies in ms", (), ("streams", "gateways", *numbers, *latencies))
    for figures in report.streams:
        table.add_row(
            str(figures.num_streams),
            str(figures.num_gateways),
            str(figures.num_requests),
            f"{figures.tokens_per_s:.0f}",
            f"{figures.cpu_per_token_s * 1e6:.1f}",
            f"{figures.cpu_share:.1%}",
            f"{figures.bench_cpu_share:.1%}",
            *_median_and_tail(figures.added_ttft),
            *_median_and_tail(figures.token_delay),
            _median_and_tail(figures.added_gap)[1],
        )
    console.print(table)
    for figures in report.streams:
        for kind, num in figures.failures.items():
            console.print(
                escape(f"error: {figures.num_streams} streams, {figures.num_gateways} gateways: {num} × {kind}")
            )
    if report.is_stopped:
        console.print(_STOPPED)


def _median_and_tail(found: Distribution | None) -> tuple[str, str]:
    return ("", "") if found is None else (f"{found.p50 * 1000:.2f}", f"{found.p99 * 1000:.2f}")


def _throughputs(runs: Iterable[Run]) -> Table:
    rows = [_throughput(part, run, figures) for run in runs for part, figures in run.parts().items()]
    shown = [name for name in rows[0] if any(row[name] for row in rows)]
    table = Table(title="Throughput", title_justify="left")
    for name in shown:
        table.add_column(name, justify="left" if name in ("load", "server") else "right", overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def _throughput(part: str, run: Run, figures: RunFigures) -> dict[str, str]:
    """A row by column; what there is nothing to say of is empty."""
    is_whole = figures is run.figures
    return {
        "load": part,
        "server": escape(run.server),
        "repeat": str(run.repeat),
        "done": str(figures.num_completed),
        "failed": str(figures.num_failed),
        "stopped": str(figures.num_stopped or ""),
        "req/s": f"{figures.request_throughput:.2f}",
        "output tok/s": f"{figures.output_throughput:.1f}",
        "total tok/s": f"{figures.total_throughput:.1f}",
        "cached": _percent(figures.cached_share or None),
        "in SLO": _percent(figures.attainment),
        "goodput req/s": "" if figures.goodput_rps is None else f"{figures.goodput_rps:.2f}",
        "load before": f"{run.machine.load_1min:.2f}" if is_whole else "",
        "busy before": _percent(run.machine.cpu_busy) if is_whole else "",
        "client CPU": f"{run.cpu_s:.2f} s, {run.cpu_share:.0%}" if is_whole else "",
    }


def _latencies(runs: Iterable[Run]) -> Table:
    titles = ("p50", "p90", "p99", "max", "samples")
    table = new_table("Latency, ms", ("load", "server", "repeat", "what"), titles)
    for run in runs:
        for part, figures in run.parts().items():
            named = {"TTFT": figures.ttft, "ITL": figures.itl, "TPOT": figures.tpot, "E2E": figures.e2e}
            for name, found in named.items():
                if found is not None:
                    table.add_row(part, escape(run.server), str(run.repeat), name, *_percentiles(found))
            gap = _ms(figures.longest_gap_s)
            table.add_row(
                part, escape(run.server), str(run.repeat), "longest gap", "", "", "", gap, "", end_section=True
            )
    return table


def _percentiles(found: Distribution) -> list[str]:
    return [*map(_ms, (found.p50, found.p90, found.p99, found.max)), str(found.num)]


def _probes(searches: Iterable[SearchResult]) -> Table:
    table = new_table("Probes", ("server", "repeat"), ("req/s", "attainment"))
    for search in searches:
        for probe in sorted(search.probes, key=lambda probe: probe.rate):
            table.add_row(escape(search.server), str(search.repeat), f"{probe.rate:.3g}", _percent(probe.attainment))
        table.add_section()
    return table


def _goodputs(searches: Iterable[SearchResult]) -> Table:
    table = new_table("Goodput", ("server", "repeat"), ("highest hit, req/s", "lowest miss, req/s"))
    for search in searches:
        miss = "none" if search.miss is None else f"{search.miss:.3g}"
        table.add_row(escape(search.server), str(search.repeat), f"{search.hit:.3g}" if search.hit else "none", miss)
    return table


def _comparisons(comparisons: Iterable[Comparison]) -> Table:
    table = new_table("Ratios", ("load", "servers", "what"), ("median", "min", "max", "pairs"))
    for c in comparisons:
        spread = (f"{c.median:.3f}", f"{c.min:.3f}", f"{c.max:.3f}", str(len(c.ratios)))
        table.add_row(c.load, escape(f"{c.server} / {c.base}"), c.metric, *spread)
    return table


def _remarks(run: Run) -> list[str]:
    details = failure_details(run)
    failures = [
        f"error: {run.server}, {run.load}: {num} × {kind}: {details[kind]}"
        for kind, num in run.figures.failures.items()
    ]
    return failures + [f"warning: {run.server}, {run.load}: {text}" for text in warnings_of(run)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
