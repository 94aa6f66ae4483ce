"""`baton bench run`, `goodput` and `mixed`: what each of them does, in order."""

import re
from collections.abc import Sequence
from dataclasses import asdict

import uvloop

from bench.client import Client, open_client
from bench.exchange import Server
from bench.interrupt import INTERRUPTED_EXIT_CODE, stop_on_interrupt
from bench.plots import check_plots, write_plots
from bench.report import check_json_path, write_json
from bench.results import Report, compare_runs, compare_searches
from bench.runs import Bench
from bench.slo import need_unloaded, resolve
from bench.specs import read_specs
from bench.tables import print_report
from bench.workload import Load, RequestSpec, mixed_specs
from common.bench_config import (
    BenchArrivalOptions,
    BenchCommand,
    BenchGoodputCommand,
    BenchMixedCommand,
    BenchMixedOptions,
    BenchObjectiveOptions,
    BenchRunCommand,
    BenchServerOptions,
)
from common.errors import ConfigError

_DEFAULT_CONCURRENCY = 8


def run(command: BenchCommand) -> int:
    """Measure, show, write. Returns 1 when a request failed, 130 after Ctrl-C, else 0. Raises: BatonError."""
    results = command.results
    if results.json:
        check_json_path(results.json)
    if results.plots:
        check_plots(results.plots)
    specs, loads = _workload(command)
    report = uvloop.run(_measure(command, specs, loads))
    print_report(report)
    if results.json:
        write_json(report, results.json)
    if results.plots:
        write_plots(report, results.plots)
    if report.is_stopped:
        return INTERRUPTED_EXIT_CODE
    return 1 if report.num_failed else 0


def _workload(command: BenchCommand) -> tuple[list[RequestSpec], list[Load]]:
    """What is asked, and the loads to ask it under; a search finds its loads itself. Raises: ConfigError."""
    match command:
        case BenchRunCommand():
            loads = _loads(command.arrivals, command.requests.trace)
            return read_specs(command.requests, command.randomness.seed), loads
        case BenchGoodputCommand():
            if not (command.objectives.ttft_slo or command.objectives.tpot_slo):
                raise ConfigError(
                    "wanted objectives to search for: --ttft-slo, --tpot-slo or both, such as 5x or 250ms"
                )
            return read_specs(command.requests, command.randomness.seed), []
        case BenchMixedCommand():
            return _mixed_specs(command.mixed), [Load("mixed")]


def _loads(arrivals: BenchArrivalOptions, trace: str) -> list[Load]:
    if arrivals.concurrency and arrivals.rate:
        raise ConfigError("--concurrency and --rate: wanted one of them, got both")
    if arrivals.rate:
        return [Load("rate", float(rate)) for rate in arrivals.rate]
    if trace and not arrivals.concurrency:
        return [Load("trace", arrivals.time_factor)]
    return [Load("concurrency", int(num)) for num in arrivals.concurrency or (_DEFAULT_CONCURRENCY,)]


def _mixed_specs(options: BenchMixedOptions) -> list[RequestSpec]:
    return mixed_specs(
        streams=(options.num_streams, options.stream_input_len, options.stream_output_len),
        long=(options.num_long, options.long_input_len, options.long_output_len),
        long_start_s=options.long_start,
        long_interval_s=options.long_interval,
    )


async def _measure(command: BenchCommand, specs: Sequence[RequestSpec], loads: Sequence[Load]) -> Report:
    options = command.servers
    stop = stop_on_interrupt()
    async with open_client(options.timeout, options.api_key[0] if options.api_key else "", stop) as client:
        report = Report(_name(command), _public_options(command), await _find_servers(client, options))
        bench = Bench(client, report, specs, command.randomness, stop)
        if options.warmup:
            await bench.warm_up(options.warmup)
        match command:
            case BenchRunCommand():
                await _set_objectives(bench, report, command.objectives)
                await bench.measure_loads(loads, options.repeats)
            case BenchGoodputCommand():
                await _set_objectives(bench, report, command.objectives)
                await _search(bench, report, command)
            case BenchMixedCommand():
                await bench.measure_loads(loads, options.repeats)
    report.is_stopped = stop.is_set()
    report.comparisons += compare_searches(report.searches, report.servers)
    if not report.searches:
        report.comparisons += compare_runs(report.runs, report.servers)
    return report


async def _set_objectives(bench: Bench, report: Report, options: BenchObjectiveOptions) -> None:
    if need_unloaded(options):
        report.unloaded = await bench.measure_unloaded(options.num_unloaded)
        if report.unloaded is None:  # stopped: nothing is measured against objectives any more
            return
    report.objectives = resolve(options, report.unloaded)


async def _search(bench: Bench, report: Report, command: BenchGoodputCommand) -> None:
    start_rate = command.search.start_rate
    if not start_rate:
        report.unloaded = report.unloaded or await bench.measure_unloaded(command.objectives.num_unloaded)
        if report.unloaded is None:  # stopped
            return
        start_rate = 1 / report.unloaded.e2e_s
    await bench.search_rates(command.search, start_rate, command.servers.repeats)


async def _find_servers(client: Client, options: BenchServerOptions) -> list[Server]:
    """Ask each for its model, which also tells that it is there. Raises: BenchError, ConfigError."""
    named = [_split_url(text) for text in options.url]
    if len({name for name, _ in named}) < len(named):
        raise ConfigError(f"--url: got {', '.join(options.url)}, wanted a name of its own for each: a=http://…")
    return [Server(name, url, options.model or await client.find_model(url)) for name, url in named]


def _split_url(text: str) -> tuple[str, str]:
    """Name, and URL without /v1; the name is by default the URL's host and port."""
    match = re.fullmatch(r"(?:([\w.-]+)=)?(https?://(.+?))/*(?:/v1/*)?", text)
    assert match is not None, f"the flag's pattern let {text!r} through"
    name, url, address = match.groups()
    return name or address, url


def _name(command: BenchCommand) -> str:
    return type(command).__name__.removeprefix("Bench").removesuffix("Command").lower()


def _public_options(command: BenchCommand) -> dict[str, object]:
    """Of the results: without the key."""
    options: dict[str, dict[str, object]] = asdict(command)
    options["servers"].pop("api_key")
    return dict(options)
