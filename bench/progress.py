"""A bar on the terminal while requests run. Nothing where standard error is no terminal."""

import contextlib
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_REFRESHES_PER_S = 2
"""Drawing is CPU of the client's, on cores that the server may share."""


@contextlib.contextmanager
def progress(title: str, total: int) -> Generator[Callable[[], None]]:
    """Gives what is to be called at the end of each of `total` requests."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(
        *columns,
        console=console,
        refresh_per_second=_REFRESHES_PER_S,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
