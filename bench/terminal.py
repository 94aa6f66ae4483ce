"""What all tables have in common."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

_WIDTH_OF_A_PIPE = 200


def open_console() -> Console:
    """Standard output; wide enough for every table where it is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH_OF_A_PIPE)


def new_table(title: str, texts: Iterable[str], numbers: Iterable[str]) -> Table:
    """Columns of texts, then columns of numbers; no rows yet."""
    table = Table(title=title, title_justify="left")
    for name in texts:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
