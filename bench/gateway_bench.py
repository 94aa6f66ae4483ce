"""`baton bench gateway`: what gateways cost and add, with real ones between clients and fake workers."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product

import uvloop

from bench.client import Client, open_client
from bench.exchange import Outcome, Server
from bench.fake_workers import FakeWorkers
from bench.gateway_figures import GatewayReport, Served, StreamsFigures, Window, summarize_streams
from bench.gateway_process import GatewayProcess, gateway_processes
from bench.interrupt import INTERRUPTED_EXIT_CODE, stop_on_interrupt
from bench.measure import measure
from bench.plots import check_plots, write_gateway_plots
from bench.progress import progress
from bench.report import check_json_path, write_json
from bench.tables import print_gateway_report
from bench.workload import Load, Plan, PlannedRequest, RequestSpec, draw_tokens
from common.bench_config import BenchGatewayCommand
from common.model_files import find_model

_TIMEOUT_S = 60.0
_IDLE_S = 2.0
_NUM_WARMUP = 64
_WARMUP_INTERVAL_S = 0.01


def run(command: BenchGatewayCommand, program: Sequence[str]) -> int:
    """Measure, show, write. program: what runs `baton`, such as (python, baton.py).

    Returns 1 when a request failed, 130 after Ctrl-C, else 0. Raises: BatonError.
    """
    results = command.results
    if results.json:
        check_json_path(results.json)
    if results.plots:
        check_plots(results.plots)
    most = max(_NUM_WARMUP, 2 * max(map(int, command.gateway.streams)))  # a slow gateway has more than was planned
    most_gateways = max(map(int, command.gateway.gateways))
    with gateway_processes(program, command.gateway.model, most_gateways, max_concurrent=most) as gateways:
        report = uvloop.run(_measure(command, gateways))
    print_gateway_report(report)
    if results.json:
        write_json(report, results.json)
    if results.plots:
        write_gateway_plots(report, results.plots)
    if report.is_stopped:
        return INTERRUPTED_EXIT_CODE
    return 1 if report.num_failed else 0


async def _measure(command: BenchGatewayCommand, gateways: Sequence[GatewayProcess]) -> GatewayReport:
    options, stop = command.gateway, stop_on_interrupt()
    workers = FakeWorkers(
        gateways[0].folder,
        find_model(options.model).model_hash,
        prefill_s=options.prefill_ms / 1000,
        step_s=1 / options.token_rate,
        vocab_size=command.randomness.vocab_size,
        seed=command.randomness.seed,
    )
    try:
        workers.start([gateway.address for gateway in gateways])
        for gateway in gateways:
            await asyncio.to_thread(gateway.wait_for_workers)
        async with open_client(_TIMEOUT_S, "", stop) as client:
            model = await client.find_model(gateways[0].url)
            bench = _GatewayBench(command, gateways, workers, client, model)
            await bench.warm_up()
            report = GatewayReport(asdict(command), await bench.idle_cpu_share())
            for num_streams, num_gateways in product(map(int, options.streams), map(int, options.gateways)):
                if figures := await bench.measure_streams(num_streams, num_gateways):
                    report.streams.append(figures)
    finally:
        workers.close()
    report.is_stopped = stop.is_set()
    return report


class _GatewayBench:
    """Mutable state: how many runs there were, since each has tokens of its own."""

    def __init__(
        self,
        command: BenchGatewayCommand,
        gateways: Sequence[GatewayProcess],
        workers: FakeWorkers,
        client: Client,
        model: str,
    ) -> None:
        self._options, self._tokens = command.gateway, command.randomness
        self._gateways = gateways
        self._workers = workers
        self._client = client
        self._model = model
        self._num_runs = 0

    async def warm_up(self) -> None:
        """A gateway's first requests load what it loads late."""
        for gateway in self._gateways:
            await self._run(gateway, self._plan(_NUM_WARMUP, _WARMUP_INTERVAL_S), lambda: None)

    async def idle_cpu_share(self) -> float:
        """Of one core for one gateway, with workers and without requests."""
        window = await self._watch(self._gateways[:1], 0.0, _IDLE_S)
        return window.gateway_cpu_s / window.length_s

    async def measure_streams(self, num_streams: int, num_gateways: int) -> StreamsFigures | None:
        """Streams that begin evenly spread, by turns at each gateway, over the time in which there are so many.

        None: it was stopped.
        """
        gateways = self._gateways[:num_gateways]
        stream_s = self._options.prefill_ms / 1000 + self._options.stream_output_len / self._options.token_rate
        num_requests = math.ceil((stream_s + self._options.seconds) * num_streams / stream_s)
        plan = self._plan(num_requests, stream_s / num_streams)
        watching = asyncio.create_task(self._watch(gateways, stream_s, self._options.seconds))
        with progress(f"{num_streams} streams", num_requests) as on_end:
            parts = [replace(plan, requests=plan.requests[first::num_gateways]) for first in range(num_gateways)]
            outcomes = await asyncio.gather(*(self._run(*pair, on_end) for pair in zip(gateways, parts, strict=True)))
        if not watching.done():
            watching.cancel()
            return None
        served = self._workers.served
        pairs = [
            (measure(exchange, started_s=0.0), served.get(tuple(exchange.request.prompt)) or Served(0.0, []))
            for outcome in outcomes
            for exchange in outcome.exchanges
        ]
        return summarize_streams(num_streams, num_gateways, pairs, watching.result())

    async def _run(self, gateway: GatewayProcess, plan: Plan, on_end: Callable[[], None]) -> Outcome:
        return await self._client.run(Server("gateway", gateway.url, self._model), plan, on_end)

    def _plan(self, num_requests: int, interval_s: float) -> Plan:
        self._num_runs += 1
        specs = [
            RequestSpec(i, self._options.stream_input_len, self._options.stream_output_len) for i in range(num_requests)
        ]
        seed, vocab_size = self._tokens.seed, self._tokens.vocab_size
        requests = [
            PlannedRequest(
                spec,
                draw_tokens(spec, seed=seed, vocab_size=vocab_size, salt=self._num_runs),
                spec.index * interval_s,
            )
            for spec in specs
        ]
        return Plan(Load("rate", 1 / interval_s), tuple(requests), None)

    async def _watch(self, gateways: Sequence[GatewayProcess], delay_s: float, length_s: float) -> Window:
        def cpu_s() -> float:
            return sum(gateway.cpu_s() for gateway in gateways)

        await asyncio.sleep(delay_s)
        begin_s, gateway_cpu_s, bench_cpu_s = time.perf_counter(), cpu_s(), time.process_time()
        await asyncio.sleep(length_s)
        return Window(begin_s, time.perf_counter(), cpu_s() - gateway_cpu_s, time.process_time() - bench_cpu_s)
