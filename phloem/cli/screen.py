"""What the subcommands draw: progress bars on stderr, tables on stdout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

__all__ = ["facts_table", "loading_bar", "progress_bar"]


def progress_bar() -> Progress:
    """A bar on stderr that vanishes when done; nothing is drawn where stderr is no terminal."""
    return _quiet_bar(MofNCompleteColumn())


@contextlib.contextmanager
def loading_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar for a model that loads; yields the callback on_load(done, total, phase)."""
    with _quiet_bar(TaskProgressColumn()) as bar:
        task = bar.add_task("starting", total=None)

        def on_load(done: int, total: int, phase: str) -> None:
            bar.update(task, description=phase, completed=done, total=total or None)

        yield on_load


def _quiet_bar(amount: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        amount,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Two columns without a header: what, and its value."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table
