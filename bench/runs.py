"""Runs against real servers, one after another."""

import asyncio
from collections.abc import Sequence

from bench.client import Client
from bench.exchange import BenchError, Server
from bench.figures import summarize, unloaded_latencies
from bench.goodput import RateSearch
from bench.interleave import in_turn
from bench.machine_load import look_at_machine
from bench.measure import RequestFigures, measure, was_stopped
from bench.progress import progress
from bench.results import Report, Run, SearchResult, group_figures
from bench.slo import Unloaded
from bench.workload import Load, RequestSpec, plan_run
from common.bench_config import BenchSearchOptions, BenchTokenOptions

_WARMUP_SALT, _UNLOADED_SALT, _FIRST_SALT = range(3)
"""Each run has tokens of its own, the same on every server, so that none finds its prompts in a prefix cache."""


class Bench:
    """Measures servers and adds to a report.

    specs: what each run asks.  stop: set by Ctrl-C; every method then returns soon, with what there is.
    twins: of two names for one URL, as in A/A, the second has tokens of its own, or it would find them in the cache.
    Mutable state: the report.
    """

    def __init__(
        self,
        client: Client,
        report: Report,
        specs: Sequence[RequestSpec],
        tokens: BenchTokenOptions,
        stop: asyncio.Event,
    ) -> None:
        self._client = client
        self._report = report
        self._specs = specs
        self._tokens = tokens
        self._stop = stop
        urls = [server.url for server in report.servers]
        self._twins = {server.name: urls[:i].count(server.url) for i, server in enumerate(report.servers)}

    async def warm_up(self, num: int) -> None:
        """Raises: BenchError when a server fails a request that runs alone."""
        for server in self._report.servers:
            await self._alone(server, num, _WARMUP_SALT, "warming up")

    async def measure_unloaded(self, num: int) -> Unloaded | None:
        """Of the first server: all servers are held to the same seconds. None when stopped. Raises: BenchError."""
        requests = await self._alone(self._report.servers[0], num, _UNLOADED_SALT, "unloaded latency")
        return None if self._stop.is_set() else unloaded_latencies(requests)

    async def measure_loads(self, loads: Sequence[Load], repeats: int) -> None:
        """Each load on each server, `repeats` times."""
        for number, load in enumerate(loads):
            for repeat in range(repeats):
                salt = _FIRST_SALT + number * repeats + repeat
                for server in in_turn(self._report.servers, repeat):
                    if not self._stop.is_set():
                        await self._run(server, load, repeat, salt)

    async def search_rates(self, options: BenchSearchOptions, start_rate: float, repeats: int) -> None:
        """One search for each server and repeat; the searches of a repeat alternate, probe by probe.

        A search ends early when nothing at all is answered: no lower rate would mend that.
        """
        for repeat in range(repeats):
            searches = {
                server.name: RateSearch(
                    start_rate,
                    wanted=options.attainment,
                    tolerance=options.tolerance,
                    max_probes=options.max_probes,
                )
                for server in self._report.servers
            }
            for turn in range(options.max_probes):
                salt = _FIRST_SALT + repeat * options.max_probes + turn
                for server in in_turn(self._report.servers, turn + repeat):
                    await self._probe(server, searches[server.name], repeat, salt)
            self._report.searches += [
                SearchResult(name, repeat, options.attainment, tuple(search.probes), search.hit, search.miss)
                for name, search in searches.items()
            ]

    async def _probe(self, server: Server, search: RateSearch, repeat: int, salt: int) -> None:
        rate = search.next_rate()
        if rate is None or self._stop.is_set():
            return
        run = await self._run(server, Load("rate", rate), repeat, salt)
        if self._stop.is_set():
            return
        assert run.figures.attainment is not None, "a search has objectives"
        search.record(rate, run.figures.attainment)
        if not run.figures.num_completed:
            search.give_up()

    async def _run(self, server: Server, load: Load, repeat: int, salt: int) -> Run:
        machine = await look_at_machine()
        requests, cpu_s, wall_s = await self._carry_out(server, load, self._specs, salt, f"{server.name}, {load}")
        objectives = self._report.objectives
        run = Run(
            server=server.name,
            load=load,
            repeat=repeat,
            machine=machine,
            cpu_s=cpu_s,
            wall_s=wall_s,
            figures=summarize(requests, objectives),
            groups=group_figures(requests, objectives),
            shares_prefixes=any(spec.hash_ids or spec.text for spec in self._specs),
            requests=tuple(requests),
        )
        self._report.runs.append(run)
        return run

    async def _alone(self, server: Server, num: int, salt: int, what: str) -> list[RequestFigures]:
        """The first requests, one at a time, again from the first where there are fewer. Raises: BenchError."""
        specs = [self._specs[i % len(self._specs)] for i in range(num)]
        requests, _, _ = await self._carry_out(server, Load("concurrency", 1), specs, salt, f"{server.name}, {what}")
        if any(request.failure and not was_stopped(request) for request in requests):
            raise _failed(server, requests)
        return requests

    async def _carry_out(
        self, server: Server, load: Load, specs: Sequence[RequestSpec], salt: int, title: str
    ) -> tuple[list[RequestFigures], float, float]:
        """Returns the requests in the order of their index, CPU seconds and wall seconds."""
        salt = salt * len(self._twins) + self._twins[server.name]
        plan = plan_run(specs, load, seed=self._tokens.seed, vocab_size=self._tokens.vocab_size, salt=salt)
        with progress(title, len(plan.requests)) as on_end:
            outcome = await self._client.run(server, plan, on_end)
        requests = [measure(exchange, outcome.started_s) for exchange in outcome.exchanges]
        requests.sort(key=lambda request: request.index)
        return requests, outcome.cpu_s, outcome.ended_s - outcome.started_s


def _failed(server: Server, requests: Sequence[RequestFigures]) -> BenchError:
    first = next(request for request in requests if request.failure and not was_stopped(request))
    return BenchError(f"{server.name} ({server.url}) does not serve the requests: {first.failure}: {first.detail}")
