"""Plans on the terminal."""

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from bench.figures import Distribution
from bench.planning.costs import Fit
from bench.planning.measured import RunComparison
from bench.planning.planner import PoolsGoodput
from bench.planning.results import PlanReport, RequestsPlan, best
from bench.terminal import new_table, open_console


def print_plan(report: PlanReport) -> None:
    console = open_console()
    console.print(_fits(report.fits))
    for plan in report.plans:
        name = escape(plan.requests)
        unloaded = plan.unloaded
        console.print(f"{name}: unloaded TTFT {_ms(unloaded.ttft_s)} ms, TPOT {_ms(unloaded.tpot_s)} ms")
        console.print(f"{name}: objectives {plan.objectives}")
        if plan.pools:
            console.print(_goodputs(f"Goodput, {name}", plan.pools))
        for num_workers, found in plan.splits.items():
            console.print(_goodputs(f"{num_workers} workers, {name}", found))
            console.print(_verdict(plan, found))
    for comparison in report.comparisons:
        console.print(_comparison(comparison))


def _fits(fits: Mapping[str, Fit]) -> Table:
    table = new_table("Costs, as fitted to what was measured", ("of", "µs"), ("error, mean", "largest", "points"))
    for name, fit in fits.items():
        terms = (f"{1e6 * each:.4g} a {what}" for what, each in zip(fit.names, fit.coefficients, strict=True) if each)
        errors = [abs(error) for error in fit.errors]
        mean, largest = sum(errors) / len(errors), max(errors)
        table.add_row(name, " + ".join(terms), f"{mean:.1%}", f"{largest:.1%}", str(len(errors)))
    return table


def _goodputs(title: str, found: Sequence[PoolsGoodput]) -> Table:
    latencies = ("TTFT p50, ms", "p90", "TPOT p50, ms", "p90")
    numbers = ("goodput, req/s", "lowest miss", "per worker", "of the first's", *latencies)
    table = new_table(title, ("prefill:decode",), (*numbers, "prefill busy", "decode busy", "preempted", "cached"))
    for each in found:
        figures = each.figures
        table.add_row(
            *(str(each.pools), _rate(each.hit), "none" if each.miss is None else _rate(each.miss)),
            *(_rate(each.per_worker), f"{each.per_worker / found[0].per_worker:.3f}" if found[0].hit else ""),
            *(*_median_and_tail(figures and figures.ttft), *_median_and_tail(figures and figures.tpot)),
            *(f"{each.prefill_busy:.0%}", f"{each.decode_busy:.0%}", str(each.num_preempted)),
            f"{figures.cached_share:.0%}" if figures else "",
        )
    return table


def _verdict(plan: RequestsPlan, found: Sequence[PoolsGoodput]) -> str:
    """In words."""
    first = best(found)
    if not first.hit:
        return f"{escape(plan.requests)}: no split meets the objectives at any rate that was probed"
    return (
        f"{escape(plan.requests)}: the best of {first.pools.num_workers} workers is {first.pools},"
        f" {_rate(first.per_worker)} req/s per worker"
    )


def _comparison(comparison: RunComparison) -> Table:
    title = f"{escape(comparison.server)}, {comparison.load}, repeat {comparison.repeat}"
    table = new_table(title, ("ms",), ("measured", "simulated", "deviation"))
    for found in comparison.deviations():
        table.add_row(found.figure, _ms(found.measured), _ms(found.simulated), f"{found.share:+.1%}")
    shares = comparison.measured.cached_share, comparison.simulated.cached_share
    table.add_section()
    table.add_row("prompt tokens cached", *(f"{share:.1%}" for share in shares), "")
    return table


def _median_and_tail(found: Distribution | None) -> tuple[str, str]:
    return ("", "") if found is None else (_ms(found.p50), _ms(found.p90))


def _rate(rate: float) -> str:
    return f"{rate:.3g}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"
