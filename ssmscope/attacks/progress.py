"""How far a search is, as a bar on stderr where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(what: str, total: int, shown: bool) -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """A bar of `total` steps, and what is called with the number of steps that are done and with what comes next."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda number: bar.advance(task, number), lambda text: bar.update(task, description=text)
