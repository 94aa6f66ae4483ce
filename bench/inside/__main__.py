"""`baton bench steps`, `phases`, `perplexity` and `handoff`: what each of them does, in order."""

from pathlib import Path

from bench.inside.decode_worker import num_cache_blocks
from bench.inside.engine import decode_command, load_engine, plan_engine, quantised
from bench.inside.handoff import measure_handoffs
from bench.inside.machine import measure_limits
from bench.inside.perplexity import measure_perplexities
from bench.inside.phases import NUM_WARMUPS, PhaseReport, measure_decode, measure_prompt
from bench.inside.plans import num_blocks_for
from bench.inside.plots import check_plot, plot_handoffs, plot_phases, plot_steps
from bench.inside.steps import StepReport, left_out, measure_curves, plan_curves
from bench.inside.tables import print_handoffs, print_perplexities, print_phases, print_steps
from bench.inside.windows import cut_windows
from bench.progress import progress
from bench.report import check_json_path, write_json
from common.bench_inside_config import (
    BenchHandoffCommand,
    BenchPerplexityCommand,
    BenchPhasesCommand,
    BenchStepsCommand,
    InsideCommand,
    PerplexityOptions,
)
from common.engine.kv_cache import TORCH_DTYPES
from common.engine.loading import ModelPlan
from common.errors import ConfigError
from gateway.tokenizer import load_tokenizer


def run(command: InsideCommand) -> int:
    """Measure, show, write. Raises: BatonError."""
    if command.results.json:
        check_json_path(command.results.json)
    match command:
        case BenchStepsCommand():
            report = _steps(command)
        case BenchPhasesCommand():
            report = _phases(command)
        case BenchPerplexityCommand():
            report = _perplexity(command)
        case BenchHandoffCommand():
            report = _handoff(command)
    if command.results.json:
        write_json(report, command.results.json)
    return 0


def _steps(command: BenchStepsCommand) -> object:
    """Each of these measures and shows, and returns its report."""
    check_plot(command.plots.plot)
    worker = quantised(decode_command(command.model, command.engine, command.ranks), command.weights.quantization)
    plan = plan_engine(worker)
    planned = plan_curves(plan, command.steps)
    num_blocks = max(curve.num_blocks for curve in planned)
    num_points = sum(len(curve.sizes) for curve in planned)
    with load_engine(plan, worker, num_blocks) as engine, progress("steps", num_points) as tick:
        curves = measure_curves(engine, planned, command.steps.step_repeats, command.steps.point_time, tick)
    report = StepReport(
        *(plan.files.name, engine.own.runner.ops.name, plan.layout.dtype, worker.worker.cores, len(plan.shards)),
        *(left_out(plan, command.steps), curves),
    )
    print_steps(report)
    if command.plots.plot:
        plot_steps(report, command.plots.plot)
    return report


def _phases(command: BenchPhasesCommand) -> object:
    check_plot(command.plots.plot)
    options, quantization = command.phases, command.weights.quantization
    worker = quantised(decode_command(command.model, command.engine, command.ranks), quantization)
    plan = plan_engine(worker)
    batch, context, repeats = options.phase_batch, options.phase_context, options.phase_repeats
    longest = max(context + NUM_WARMUPS + repeats + 2, options.phase_prompt_len)
    if longest > plan.files.max_context:
        raise ConfigError(
            f"wanted contexts and prompts of at most the {plan.files.max_context} tokens that the model takes, steps"
            f" included, got {longest}"
        )
    size = plan.layout.block_size
    num_blocks = max(
        num_cache_blocks(batch, context + NUM_WARMUPS + repeats + 2, size),
        num_blocks_for(1, options.phase_prompt_len, size),
    )
    tokenizer = load_tokenizer(plan.files)
    with load_engine(plan, worker, num_blocks) as engine:
        limits = measure_limits(worker.worker.cores, TORCH_DTYPES[plan.layout.dtype])
        breakdowns = [
            measure_decode(engine, tokenizer, limits, batch, context, repeats, quantization),
            measure_prompt(engine, limits, options.phase_prompt_len, repeats, quantization),
        ]
    report = PhaseReport(plan.files.name, engine.own.runner.ops.name, len(plan.shards), limits, breakdowns)
    print_phases(report)
    if command.plots.plot:
        plot_phases(report, command.plots.plot)
    return report


def _perplexity(command: BenchPerplexityCommand) -> object:
    options = command.text
    worker = decode_command(command.model, command.engine)
    plan = plan_engine(worker)
    token_ids = _read_tokens(plan, options)
    num_windows = len(cut_windows(len(token_ids), options.window, options.stride))
    with progress("windows", num_windows * len(options.quantizations)) as tick:
        report = measure_perplexities(
            *(plan, worker, options.quantizations, token_ids, options.window, options.stride, tick),
        )
    print_perplexities(report)
    return report


def _read_tokens(plan: ModelPlan, options: PerplexityOptions) -> list[int]:
    """Raises: ConfigError when there is no text, or no window that it can be cut into; ModelError."""
    if not options.stride < options.window <= plan.files.max_context:
        raise ConfigError(
            f"wanted --stride below --window, and that at most the {plan.files.max_context} tokens of the model,"
            f" got {options.stride} and {options.window}"
        )
    try:
        text = Path(options.text_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--text-file: cannot read {options.text_file or 'a file without a name'}: {error}"
        ) from error
    token_ids = load_tokenizer(plan.files).encode(text, add_special_tokens=True)
    token_ids = token_ids[: options.max_text_tokens or None]
    if len(token_ids) < 2:
        raise ConfigError(f"--text-file: wanted two tokens at least, got {len(token_ids)} in {options.text_file}")
    return token_ids


def _handoff(command: BenchHandoffCommand) -> object:
    check_plot(command.plots.plot)
    options = command.handoff
    lens = [int(num) for num in options.handoff_lens]
    layout = plan_engine(decode_command(command.model)).layout
    with progress("handing over", len(options.transports) * len(lens) * options.handoff_repeats) as tick:
        report = measure_handoffs(layout, options.transports, lens, options.handoff_repeats, tick)
    print_handoffs(report)
    if command.plots.plot:
        plot_handoffs(report, command.plots.plot)
    return report
