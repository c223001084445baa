"""How far work is, on stderr: lines, and a bar where that is a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def on_stderr(shown: bool = True) -> Console:
    """Prints lines on stderr as they are, or nowhere."""
    from rich.console import Console

    return Console(stderr=True, quiet=not shown, highlight=False, markup=False, soft_wrap=True)


def progress_bar(console: Console | None = None) -> Progress:
    """A bar that goes when it is done; none where the console is no terminal, or quiet."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = on_stderr() if console is None else console
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=console.quiet or not console.is_terminal, transient=True)
