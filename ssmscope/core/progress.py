"""Progress of work on stderr: lines, and a bar on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

SECONDS_BEFORE_FIRST_LINE = 2.0
SECONDS_BETWEEN_LINES = 10.0
"""Seconds until the second line; each later pause is half as long again, up to `MAX_SECONDS_BETWEEN_LINES`."""
MAX_SECONDS_BETWEEN_LINES = 120.0
SECONDS_WORTH_AN_ESTIMATE = 30.0


class _Seen:
    """Tokens read by models in this process, the newest bar, and the words of lines: Python's, or a command line's."""

    tokens = 0
    bar: Progress | None = None
    words: Callable[[str], str] = str


def duration(seconds: float) -> str:
    """Format a time: "14 s", "2.5 min", "1.2 h"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


@contextmanager
def worded_by(words: Callable[[str], str]) -> Iterator[None]:
    """Pass every line for stderr through `words`, which names options as the user gives them."""
    _Seen.words, before = words, _Seen.words
    try:
        yield
    finally:
        _Seen.words = before


def count_tokens(number: int) -> None:
    """Count tokens that a model reads, for `pulse`."""
    _Seen.tokens += number


def on_stderr(shown: bool = True) -> Console:
    """Return a console that prints lines on stderr as they are, or nothing if not `shown`."""
    from rich.console import Console

    class Lines(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(_Seen.words(each) if isinstance(each, str) else each for each in objects), **options)

    return Lines(stderr=True, quiet=not shown, highlight=False, markup=False, soft_wrap=True)


def progress_bar(console: Console | None = None) -> Progress:
    """Return a bar that vanishes when it is done, hidden if the console is quiet or no terminal."""
    from rich import progress as rich

    console = on_stderr() if console is None else console
    text, count = rich.TextColumn("{task.description}", markup=False), rich.MofNCompleteColumn()
    columns = (text, rich.BarColumn(), count, rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
    hidden = console.quiet or not console.is_terminal
    _Seen.bar = rich.Progress(*columns, console=console, disable=hidden, auto_refresh=not hidden, transient=True)
    return _Seen.bar


@contextmanager
def pulse(name: str, shown: bool = True) -> Iterator[None]:
    """Report progress on stderr after two seconds, and now and then after that, unless a bar does."""
    if not shown:
        yield
        return
    begun, before, ended, stream = time.monotonic(), _Seen.tokens, threading.Event(), sys.stderr
    _Seen.bar = None

    def say() -> None:
        wait, pause = SECONDS_BEFORE_FIRST_LINE, SECONDS_BETWEEN_LINES
        while not ended.wait(wait):
            wait, pause = pause, min(1.5 * pause, MAX_SECONDS_BETWEEN_LINES)
            bar = _Seen.bar
            if bar is not None and not bar.disable:
                continue
            tasks = [] if bar is None else [task for task in bar.tasks if task.total]
            parts = [f"{task.completed:,.0f} of {task.total:,.0f} {task.description}".strip() for task in tasks[-1:]]
            parts.append(f"{_Seen.tokens - before:,} tokens read" if _Seen.tokens > before else "at work")
            seconds, left = time.monotonic() - begun, tasks[-1].time_remaining if tasks else None
            about = f", about {duration(left)} left" if left and seconds + left >= SECONDS_WORTH_AN_ESTIMATE else ""
            print(f"{name}: {', '.join(parts)} after {seconds:.0f} s{about}", file=stream, flush=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
