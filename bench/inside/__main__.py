"""`baton bench steps` and `handoff`: what each of them does, in order."""

from bench.inside.engine import find_source, load_engine
from bench.inside.handoff import HandoffReport, measure_handoffs
from bench.inside.plots import check_plot, plot_handoffs, plot_steps
from bench.inside.steps import StepReport, left_out, measure_curves, plan_curves
from bench.inside.tables import print_handoffs, print_steps
from bench.progress import progress
from bench.report import check_json_path, write_json
from common.bench_inside_config import BenchHandoffCommand, BenchStepsCommand, InsideCommand, InsideResultOptions


def run(command: InsideCommand) -> int:
    """Measure, show, write. Raises: BatonError."""
    results = command.results
    _check_results(results)
    match command:
        case BenchStepsCommand():
            report = _measure_steps(command)
            print_steps(report)
            if results.plot:
                plot_steps(report, results.plot)
        case BenchHandoffCommand():
            report = _measure_handoffs(command)
            print_handoffs(report)
            if results.plot:
                plot_handoffs(report, results.plot)
    if results.json:
        write_json(report, results.json)
    return 0


def _check_results(results: InsideResultOptions) -> None:
    """Before minutes of measuring. Raises: ConfigError."""
    if results.json:
        check_json_path(results.json)
    if results.plot:
        check_plot(results.plot)


def _measure_steps(command: BenchStepsCommand) -> StepReport:
    source = find_source(command.model)
    planned = plan_curves(source, command.steps)
    num_blocks = max(curve.num_blocks for curve in planned)
    engine = load_engine(source, command.engine, command.weights.quantization, num_blocks)
    with progress("steps", sum(len(curve.sizes) for curve in planned)) as tick:
        curves = measure_curves(engine, planned, command.steps.step_repeats, command.steps.point_time, tick)
    return StepReport(
        *(source.files.name, engine.ops.name, source.layout.dtype, engine.num_cores),
        *(left_out(source, command.steps), curves),
    )


def _measure_handoffs(command: BenchHandoffCommand) -> HandoffReport:
    options = command.handoff
    lens = [int(num) for num in options.handoff_lens]
    total = len(options.transports) * len(lens) * options.handoff_repeats
    layout = find_source(command.model).layout
    with progress("handing over", total) as tick:
        return measure_handoffs(layout, options.transports, lens, options.handoff_repeats, tick)
