"""`baton bench plan`: what it does, in order."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bench.planning.costs import Fit, read_handoff_costs, read_step_costs
from bench.planning.deployment import Pools, WorkerModel
from bench.planning.measured import compare_measured
from bench.planning.planner import Planner, PoolsGoodput, parse_pools, splits
from bench.planning.results import PlanReport, RequestsPlan
from bench.planning.tables import print_plan
from bench.progress import progress
from bench.report import check_json_path, write_json
from bench.slo import resolve
from bench.trace import read_trace
from bench.workload import RequestSpec, parse_lengths, random_specs, trace_specs
from common.bench_plan_config import BenchPlanCommand, PlanRequestOptions
from common.errors import ConfigError
from common.worker_config import TransferOptions


def run(command: BenchPlanCommand) -> int:
    """Simulate, show, write. Raises: ConfigError."""
    results = command.results
    if results.json:
        check_json_path(results.json)
    model = _worker_model(command)
    pools = [parse_pools(text) for text in command.pools.pools]
    plans = [] if results.measured else _plan(command, model, pools)
    comparisons = compare_measured(results.measured, (pools or [Pools(1, 1)])[0], model) if results.measured else []
    report = PlanReport(asdict(command), _fits(model), plans, comparisons)
    print_plan(report)
    if results.json:
        write_json(report, results.json)
    return 0


def _worker_model(command: BenchPlanCommand) -> WorkerModel:
    costs, pools = command.costs, command.pools
    return WorkerModel(
        steps=read_step_costs("--steps", costs.steps),
        shared_steps=read_step_costs("--shared-steps", costs.shared_steps) if costs.shared_steps else None,
        handoff=read_handoff_costs(costs.handoffs, costs.handoff_transport),
        link_s=costs.link_ms / 1000,
        vocab_size=command.randomness.vocab_size,
        block_size=pools.block_size,
        num_blocks=pools.kv_cache_tokens // pools.block_size,
        max_batch_prefill_tokens=command.prefill.max_batch_prefill_tokens,
        max_step_s=command.prefill.max_step_ms / 1000,
        max_num_seqs=command.decode.max_num_seqs,
        itl_target_s=command.pacing.itl_target / 1000,
        kv_lease_s=TransferOptions().kv_lease,
    )


def _fits(model: WorkerModel) -> dict[str, Fit]:
    fits = {"prompts": model.steps.prompt, "decode steps": model.steps.decode}
    if shared := model.shared_steps:
        fits |= {"prompts beside others": shared.prompt, "decode steps beside others": shared.decode}
    return fits | {"handoffs": model.handoff}


def _plan(command: BenchPlanCommand, model: WorkerModel, pools: list[Pools]) -> list[RequestsPlan]:
    """For each trace. Raises: ConfigError."""
    objectives, numbers = command.objectives, [int(text) for text in command.pools.split]
    if not (objectives.ttft_slo or objectives.tpot_slo):
        raise ConfigError("wanted objectives to plan for: --ttft-slo, --tpot-slo or both, such as 5x or 250ms")
    if not (pools or numbers):
        raise ConfigError("wanted deployments to plan: --pools such as 1:1,2:2, or --split such as 8")
    kinds = _kinds(command.requests, command.randomness.seed)
    num_searches = len(pools) + sum(len(splits(num)) for num in numbers)
    with progress("planning", num_searches * len(kinds)) as tick:
        return [_plan_requests(name, specs, command, model, pools, numbers, tick) for name, specs in kinds]


def _kinds(options: PlanRequestOptions, seed: int) -> list[tuple[str, list[RequestSpec]]]:
    """What is asked, and what to call it. Raises: ConfigError."""
    if options.traces:
        return [(Path(path).name, _trace_specs(path, options)) for path in options.traces]
    lengths = parse_lengths(options.input_len), parse_lengths(options.output_len)
    name = f"{options.input_len} tokens in, {options.output_len} out"
    return [(name, random_specs(options.requests_per_worker, *lengths, seed))]


def _trace_specs(path: str, options: PlanRequestOptions) -> list[RequestSpec]:
    rows = read_trace(path)
    return trace_specs(rows, len(rows), options.max_input_len, options.max_output_len)


def _plan_requests(
    name: str,
    specs: list[RequestSpec],
    command: BenchPlanCommand,
    model: WorkerModel,
    pools: list[Pools],
    numbers: list[int],
    tick: Callable[[], None],
) -> RequestsPlan:
    planner = Planner(model, specs, command.requests.requests_per_worker, command.randomness)
    unloaded = planner.measure_unloaded(command.objectives.num_unloaded)
    objectives = resolve(command.objectives, unloaded)

    def search(pools: Pools) -> PoolsGoodput:
        start_rate = command.search.start_rate or min(pools.num_prefill, pools.num_decode) / unloaded.e2e_s
        found = planner.search(pools, objectives, command.search, start_rate)
        tick()
        return found

    by_number = {num: [search(each) for each in splits(num)] for num in numbers}
    return RequestsPlan(name, unloaded, objectives, [search(each) for each in pools], by_number)
