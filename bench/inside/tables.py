"""Results of the commands that look inside, on the terminal."""

from rich.markup import escape
from rich.table import Table

from bench.inside.curves import Curve
from bench.inside.handoff import HandoffReport
from bench.inside.perplexity import PerplexityReport
from bench.inside.phases import Phase, PhaseReport
from bench.inside.steps import StepReport
from bench.terminal import new_table, open_console

SUPER_LINEAR = 1.1
"""An exponent above it is more than the noise of a proportional cost."""


def print_handoffs(report: HandoffReport) -> None:
    console = open_console()
    numbers = ("tokens", "MB", "median, ms", "min", "max", "GB/s", "of a core's limit", "repeats")
    table = new_table("Handoffs between two processes", ("transport",), numbers)
    for found in report.handoffs:
        table.add_row(
            *(found.transport, str(found.num_tokens), f"{found.num_bytes / 1e6:.1f}"),
            *(_ms(found.median_s), _ms(min(found.times_s)), _ms(max(found.times_s))),
            *(f"{found.bytes_per_s / 1e9:.2f}", f"{found.bytes_per_s / report.limit_bytes_per_s:.0%}"),
            str(len(found.times_s)),
        )
    console.print(table)
    console.print(f"One core that copies blocks and checks the copies: {report.limit_bytes_per_s / 1e9:.2f} GB/s")
    for transport, time_s in report.connect_s.items():
        console.print(f"The first block over {transport}, with the connection: {_ms(time_s)} ms")


def print_steps(report: StepReport) -> None:
    console = open_console()
    console.print(
        f"{escape(report.model)}, {report.dtype}, {report.ops}, {_machine(report.num_cores, report.num_ranks)}"
    )
    for curve in report.curves:
        console.print(_curve(curve))
        console.print(f"{curve.title}: {_growth(curve)}")
        if unsteady := [str(point.size) for point in curve.points if point.is_unsteady]:
            console.print(f"warning: unsteady at {', '.join(unsteady)}: did something else run?")
    if report.left_out:
        console.print(f"Left out, longer than the model takes: {', '.join(map(str, report.left_out))}")


def _curve(curve: Curve) -> Table:
    table = new_table(curve.title, (), (curve.size_name, "median, ms", "min", "max", "tok/s", "growth", "repeats"))
    for point, exponent in zip(curve.points, [None, *curve.exponents()], strict=True):
        times_s = point.times_s
        table.add_row(
            *(str(point.size), _ms(point.median_s), _ms(min(times_s)), _ms(max(times_s))),
            *(f"{point.num_tokens / point.median_s:.0f}", "" if exponent is None else f"{exponent:.2f}"),
            str(len(times_s)),
        )
    return table


def _growth(curve: Curve) -> str:
    """The exponents in a line; what grows faster than its size stands out."""
    steps = [
        f"to {point.size} {'[bold red]' if exponent > SUPER_LINEAR else ''}{exponent:.2f}"
        f"{'[/bold red] (more than proportional)' if exponent > SUPER_LINEAR else ''}"
        for point, exponent in zip(curve.points[1:], curve.exponents(), strict=True)
    ]
    return f"time grows as {curve.size_name} to the power of: {', '.join(steps) or 'one point only'}"


def print_phases(report: PhaseReport) -> None:
    console = open_console()
    limits = report.limits
    machine = _machine(limits.num_cores, report.num_ranks)
    console.print(
        f"{escape(report.model)}, {report.ops}, {machine}, which read {limits.read_bytes_per_s / 1e9:.1f} GB/s"
        f" and compute {limits.flops / 1e9:.0f} GFLOP/s in {limits.dtype} at most."
    )
    for breakdown in report.breakdowns:
        numbers = ("median, ms", "of the step", "GB/s", "GFLOP/s", "of the limit", "samples")
        table = new_table(breakdown.title, ("phase",), numbers)
        for phase in breakdown.phases:
            table.add_row(*_phase_row(phase, breakdown.median_s))
        table.add_section()
        limited = sum(phase.shortest_s for phase in breakdown.phases)
        table.add_row("step", _ms(breakdown.median_s), "", "", "", f"{limited / breakdown.median_s:.0%}", "")
        console.print(table)


def _machine(num_cores: int, num_ranks: int) -> str:
    ranks = f"{num_ranks} ranks on " if num_ranks > 1 else ""
    return f"{ranks}{num_cores} cores"


def _phase_row(phase: Phase, step_s: float) -> list[str]:
    rates = ["", "", ""]
    if phase.work and phase.median_s:
        rates = [
            f"{phase.work.num_bytes / phase.median_s / 1e9:.1f}",
            f"{phase.work.num_flops / phase.median_s / 1e9:.0f}",
            f"{phase.share_of_limit:.0%}",
        ]
    name = phase.name.replace("_", " ")
    return [name, f"{1000 * phase.median_s:.3f}", f"{phase.median_s / step_s:.1%}", *rates, str(len(phase.times_s))]


def print_perplexities(report: PerplexityReport) -> None:
    console = open_console()
    numbers = ("perplexity", "over the first's", "standard error", "same likeliest token", "s", "tok/s computed")
    table = new_table("Perplexity", ("quantization", "ops"), numbers)
    for found in report.results:
        table.add_row(
            *(found.quantization, found.ops, f"{found.perplexity:.3f}"),
            *(f"{found.comparison.ratio:.4f}", f"{found.comparison.ratio_error:.4f}"),
            *(f"{found.comparison.same_guesses:.1%}", f"{found.time_s:.1f}"),
            f"{report.num_computed / found.time_s:.0f}",
        )
    console.print(table)
    console.print(
        f"{escape(report.model)}, {report.dtype}: {report.num_scored} tokens, in windows of {report.window},"
        f" one every {report.stride}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"
