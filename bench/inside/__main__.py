"""`baton bench steps`, `phases`, `perplexity` and `handoff`: what each of them does, in order."""

from pathlib import Path

from bench.inside.decode_worker import num_cache_blocks
from bench.inside.engine import ModelSource, find_source, load_engine
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
    source = find_source(command.model)
    planned = plan_curves(source, command.steps)
    num_blocks = max(curve.num_blocks for curve in planned)
    engine = load_engine(source, command.engine, command.weights.quantization, num_blocks)
    with progress("steps", sum(len(curve.sizes) for curve in planned)) as tick:
        curves = measure_curves(engine, planned, command.steps.step_repeats, command.steps.point_time, tick)
    report = StepReport(
        *(source.files.name, engine.ops.name, source.layout.dtype, engine.num_cores),
        *(left_out(source, command.steps), curves),
    )
    print_steps(report)
    if command.plots.plot:
        plot_steps(report, command.plots.plot)
    return report


def _phases(command: BenchPhasesCommand) -> object:
    check_plot(command.plots.plot)
    options, quantization = command.phases, command.weights.quantization
    source = find_source(command.model)
    batch, context, repeats = options.phase_batch, options.phase_context, options.phase_repeats
    longest = max(context + NUM_WARMUPS + repeats + 2, options.phase_prompt_len)
    if longest > source.files.max_context:
        raise ConfigError(
            f"wanted contexts and prompts of at most the {source.files.max_context} tokens that the model takes, steps"
            f" included, got {longest}"
        )
    size = source.layout.block_size
    num_blocks = max(
        num_cache_blocks(batch, context + NUM_WARMUPS + repeats + 2, size),
        num_blocks_for(1, options.phase_prompt_len, size),
    )
    engine = load_engine(source, command.engine, quantization, num_blocks)
    limits = measure_limits(engine.num_cores, TORCH_DTYPES[source.layout.dtype])
    tokenizer = load_tokenizer(source.files)
    breakdowns = [
        measure_decode(engine, tokenizer, limits, batch, context, repeats, quantization),
        measure_prompt(engine, limits, options.phase_prompt_len, repeats, quantization),
    ]
    report = PhaseReport(source.files.name, engine.ops.name, limits, breakdowns)
    print_phases(report)
    if command.plots.plot:
        plot_phases(report, command.plots.plot)
    return report


def _perplexity(command: BenchPerplexityCommand) -> object:
    options = command.text
    source = find_source(command.model)
    token_ids = _read_tokens(source, options)
    num_windows = len(cut_windows(len(token_ids), options.window, options.stride))
    with progress("windows", num_windows * len(options.quantizations)) as tick:
        report = measure_perplexities(
            *(source, command.engine, options.quantizations, token_ids, options.window, options.stride, tick),
        )
    print_perplexities(report)
    return report


def _read_tokens(source: ModelSource, options: PerplexityOptions) -> list[int]:
    """Raises: ConfigError when there is no text, or no window that it can be cut into; ModelError."""
    if not options.stride < options.window <= source.files.max_context:
        raise ConfigError(
            f"wanted --stride below --window, and that at most the {source.files.max_context} tokens of the model,"
            f" got {options.stride} and {options.window}"
        )
    try:
        text = Path(options.text_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--text-file: cannot read {options.text_file or 'a file without a name'}: {error}"
        ) from error
    token_ids = load_tokenizer(source.files).encode(text, add_special_tokens=True)
    token_ids = token_ids[: options.max_text_tokens or None]
    if len(token_ids) < 2:
        raise ConfigError(f"--text-file: wanted two tokens at least, got {len(token_ids)} in {options.text_file}")
    return token_ids


def _handoff(command: BenchHandoffCommand) -> object:
    check_plot(command.plots.plot)
    options = command.handoff
    lens = [int(num) for num in options.handoff_lens]
    layout = find_source(command.model).layout
    with progress("handing over", len(options.transports) * len(lens) * options.handoff_repeats) as tick:
        report = measure_handoffs(layout, options.transports, lens, options.handoff_repeats, tick)
    print_handoffs(report)
    if command.plots.plot:
        plot_handoffs(report, command.plots.plot)
    return report
