"""Answers by layer in a terminal: a line per token with the answers of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table
from rich.text import Text

from ssmscope.interp.views.tokens import shorten, visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ssmscope.probes.trajectory import LensedText, Trajectory

ROWS = 40
"""How many tokens of a text the table has."""
FIXED, COLUMN = 40, 12
"""Characters that the other columns take, and that one layer's does."""


def terminal_view(result: Trajectory, *, width: int) -> Iterator[RenderableType]:
    """Per text a line per token: where its answer settled, the final answer, and the answers of as many layers as the
    terminal is wide."""
    yield Text(visible(result.headline), style="bold")
    shown = spread(result.layers, max((width - FIXED) // COLUMN, 2))
    yield Text(
        f"Layer i reads what enters block i, 0 the embeddings; {result.layers} is the model itself. Settled: the layer "
        "from which on the final answer leads; bold, the layers that give it.",
        style="dim",
    )
    if len(shown) < result.layers:
        yield Text(f"{len(shown)} of {result.layers} layers below the model's answer; the files have all", style="dim")
    if result.positions == "last":
        yield Text("")
        yield _table(result.texts, [0] * len(result.texts), list(range(1, len(result.texts) + 1)), shown, "text")
        return
    for number, text in enumerate(result.texts, start=1):
        yield Text("")
        if len(result.texts) > 1:
            yield Text(f"{number}", style="dim")
        places = list(range(min(len(text.positions), ROWS)))
        yield _table((text,) * len(places), places, text.positions.tolist(), shown, "")
        if len(places) < len(text.positions):
            yield Text(f"{len(places)} of {len(text.positions)} tokens; the files have all", style="dim")


def spread(layers: int, most: int) -> list[int]:
    """At most so many of the layers below the model, evenly apart, the first and the last among them."""
    if layers <= most:
        return list(range(layers))
    return np.rint(np.linspace(0, layers - 1, most)).astype(int).tolist()


def _table(
    texts: tuple[LensedText, ...], columns: list[int], labels: list[int], layers: list[int], counted: str
) -> Table:
    """A line per (text, column of its arrays)."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(counted, justify="right", no_wrap=True)
    table.add_column("token", no_wrap=True)
    table.add_column("settled", justify="right", no_wrap=True)
    for layer in layers:
        table.add_column(f"layer {layer}", no_wrap=True, overflow="ellipsis")
    table.add_column("answer", no_wrap=True, overflow="ellipsis")
    for text, column, label in zip(texts, columns, labels):
        cells = [
            Text(_short(text.answers[layer][column], 10), style="bold" if text.agrees[layer, column] else "")
            for layer in layers
        ]
        final = f"{_short(text.final[column], 12)} {text.answer_probability[-1, column]:.2f}"
        token = Text(_short(text.tokens[text.positions[column]], 12))
        table.add_row(str(label), token, str(text.settled[column]), *cells, Text(final, style="bold"))
    return table


def _short(token: str, width: int) -> str:
    return shorten(visible(token).strip(" ") or "␣", width)
