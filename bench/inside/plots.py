"""Results of the commands that look inside, as one plot each."""

# pyright: basic

from pathlib import Path
from typing import TYPE_CHECKING

from bench.inside.handoff import HandoffReport
from bench.inside.phases import PhaseReport
from bench.inside.steps import StepReport
from bench.plots import check_matplotlib, finish, label_plainly, new_figure
from common.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot(path: str) -> None:
    """Before minutes of measuring; nothing to check when no plot is wanted. Raises: ConfigError."""
    if not path:
        return
    check_matplotlib("--plot")
    if Path(path).suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot: got {path}, wanted a name that ends in .png or .svg")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"--plot: got {path}, wanted a file in a folder that exists")


def plot_handoffs(report: HandoffReport, path: str) -> None:
    figure, (axes,) = new_figure(1)
    for transport in dict.fromkeys(found.transport for found in report.handoffs):
        line = [found for found in report.handoffs if found.transport == transport]
        axes.plot(
            [found.num_tokens for found in line],
            [found.bytes_per_s / 1e9 for found in line],
            marker="o",
            label=transport,
        )
    limit = report.limit_bytes_per_s / 1e9
    axes.axhline(limit, color="gray", linestyle="--", linewidth=1, label="one core: a copy and a checksum")
    axes.set(xlabel="tokens", ylabel="GB/s", xscale="log", ylim=(0, None))
    label_plainly(axes.xaxis)
    finish(axes)
    _save(figure, path)


def plot_steps(report: StepReport, path: str) -> None:
    """Both axes logarithmic: a straight line is a power, and one as steep as the gray ones is proportional."""
    figure, axes = new_figure(len(report.curves), 4.0)
    for one, curve in zip(axes, report.curves, strict=True):
        sizes = [point.size for point in curve.points]
        medians = [1000 * point.median_s for point in curve.points]
        fastest = [1000 * min(point.times_s) for point in curve.points]
        slowest = [1000 * max(point.times_s) for point in curve.points]
        one.fill_between(sizes, fastest, slowest, alpha=0.2)
        one.plot(sizes, medians, marker="o", label="median, fastest to slowest")
        one.plot(
            sizes,
            [medians[-1] * size / sizes[-1] for size in sizes],
            color="gray",
            linestyle="--",
            label="proportional",
        )
        one.set(title=curve.title, xlabel=curve.size_name, ylabel="ms", xscale="log", yscale="log")
        for axis in (one.xaxis, one.yaxis):
            label_plainly(axis)
        finish(one)
    _save(figure, path)


def plot_phases(report: PhaseReport, path: str) -> None:
    """Bars of each phase's time, and in them what the machine would need at its limits."""
    figure, axes = new_figure(len(report.breakdowns), 4.0)
    for one, breakdown in zip(axes, report.breakdowns, strict=True):
        names = [phase.name.replace("_", " ") for phase in breakdown.phases]
        one.barh(names, [1000 * phase.median_s for phase in breakdown.phases], color="C0", label="measured")
        one.barh(
            names, [1000 * phase.shortest_s for phase in breakdown.phases], height=0.4, color="C1", label="at the limit"
        )
        one.set(title=breakdown.title, xlabel="ms")
        one.invert_yaxis()
        finish(one)
    _save(figure, path)


def _save(figure: "Figure", path: str) -> None:
    """Raises: ConfigError."""
    try:
        figure.savefig(path, dpi=100)
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror}") from error
