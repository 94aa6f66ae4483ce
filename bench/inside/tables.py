"""Results of the commands that look inside, on the terminal."""

from bench.inside.handoff import HandoffReport
from bench.terminal import new_table, open_console


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


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"
