"""`baton bench handoff`: what each command does, in order."""

from bench.inside.handoff import HandoffReport, measure_handoffs
from bench.inside.plots import check_plot, plot_handoffs
from bench.inside.tables import print_handoffs
from bench.progress import progress
from bench.report import check_json_path, write_json
from common.bench_inside_config import BenchHandoffCommand, InsideCommand, InsideModelOptions, InsideResultOptions
from common.engine.kv_cache import kv_layout
from common.engine.model_config import read_model_config
from common.engine.runner import resolve_dtype
from common.kv_layout import KVLayout
from common.model_files import find_model


def run(command: InsideCommand) -> int:
    """Measure, show, write. Raises: BatonError."""
    _check_results(command.results)
    report = _measure_handoffs(command)
    print_handoffs(report)
    if command.results.plot:
        plot_handoffs(report, command.results.plot)
    if command.results.json:
        write_json(report, command.results.json)
    return 0


def _check_results(results: InsideResultOptions) -> None:
    """Before minutes of measuring. Raises: ConfigError."""
    if results.json:
        check_json_path(results.json)
    if results.plot:
        check_plot(results.plot)


def _measure_handoffs(command: BenchHandoffCommand) -> HandoffReport:
    options = command.handoff
    lens = [int(num) for num in options.handoff_lens]
    total = len(options.transports) * len(lens) * options.handoff_repeats
    with progress("handing over", total) as tick:
        return measure_handoffs(_layout(command.model), options.transports, lens, options.handoff_repeats, tick)


def _layout(options: InsideModelOptions) -> KVLayout:
    files = find_model(options.model)
    return kv_layout(read_model_config(files), resolve_dtype(options.dtype), options.block_size, files.model_hash)
