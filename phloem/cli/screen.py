"""What the subcommands draw: progress bars on stderr, tables on stdout."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["facts_table", "progress_bar"]


def progress_bar() -> Progress:
    """A bar on stderr that vanishes when done; nothing is drawn where stderr is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Two columns without a header: what, and its value."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table
