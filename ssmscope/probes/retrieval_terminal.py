"""Retrieval in a terminal: a grid of accuracies for every model, and of ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ssmscope.bootstrap import Estimate

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from ssmscope.probes.retrieval import Retrieval


RATIOS = (
    ", paired bootstrap over questions of ratios. * differs: the interval excludes 1, and the sign test has p < 0.05."
)


def show(result: Retrieval) -> Iterable[RenderableType]:
    from rich.text import Text

    yield Text(result.headline)
    for number, name in enumerate(result.models):
        yield Text(f"\naccuracy of {name}", style="bold")
        rows = [[numbers(cell.accuracy) for cell in row] for row in result.cells[number]]
        yield _grid(result, rows, [f"{each:.3g}" for each in result.chance])
    for number, name in enumerate(result.models[1:]):
        yield Text(f"\naccuracy of {result.models[0]} / accuracy of {name} (* differs)", style="bold")
        yield _grid(result, [[numbers(one.value, one.differs) for one in row] for row in result.ratios[number]])
    yield Text(f"\n{about(result)}; context tokens of the first model's tokenizer.")
    yield Text("Intervals of 95 %: Wilson's of accuracies" + (RATIOS if result.ratios else "."))
    yield from (Text(f"Note: {note}.") for note in result.notes)


def about(result: Retrieval) -> str:
    """What was asked."""
    filler = result.provenance["options"]["filler"]
    most = result.examples
    return f"{most:,} question{'s' if most > 1 else ''} a cell, {result.provenance['data']['split']}; filler {filler}"


def numbers(found: Estimate, marked: bool = False) -> str:
    """A number and, on a line of its own, its interval."""
    if math.isnan(found.value):
        return "–"
    return f"{brief(found.value)}{'*' if marked else ''}\n[{brief(found.low)}, {brief(found.high)}]"


def brief(value: float) -> str:
    """Two digits after the point; "∞" beyond numbers."""
    return "∞" if math.isinf(value) else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _grid(result: Retrieval, rows: Sequence[Sequence[str]], chance: Sequence[str] = ()) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("task", no_wrap=True)
    for length in result.lengths:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
    if chance:
        table.add_column("chance", justify="right", no_wrap=True)
    for at, (task, row) in enumerate(zip(result.tasks, rows)):
        table.add_row(task, *row, *chance[at : at + 1])
    return table
