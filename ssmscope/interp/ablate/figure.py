"""Figure of an ablation: a map of heads, or a row for each part, and below it curves of parts ablated together."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ssmscope.interp.ablate.result import Ablation
from ssmscope.render import figure as plot
from ssmscope.render.colours import SIGNED

MAX_ROWS = 24


def draw(result: Ablation, frame: plot.Frame) -> Figure:
    """Draw the harm of each ablation, with a dot on the map for a head that can go, and the curves below."""
    heads = result.what == "head"
    layers = sorted({unit.layer for unit in result.units})
    shown = result.ranked[:MAX_ROWS]
    below = plot.data_line(result, f"{'a dot' if heads else 'grey'}: can go")
    styles: tuple[dict[str, Any], ...] = ({}, {"linestyle": plot.DASHED})
    names = ("least important first", "in a random order")
    legend = [(plot.handle(at, **style), name) for at, (style, name) in enumerate(zip(styles, names))]
    sheet = plot.Sheet(frame, result.headline, below, legend)
    high = float(np.clip(0.26 * len(layers), 0.8, 5.5)) if heads else plot.ROW_INCHES * len(shown)
    upper, lower = sheet.panels(high, 2.1)
    if heads:
        _map(upper, result, layers)
    else:
        colours = [[plot.SOFT if number in result.can_go else plot.INK for number in shown]]
        plot.points(upper, [result.units[n].name for n in shown], [result.harm(n) for n in shown], colours=colours)
        upper.set_xlabel(f"{result.metric} worse by")
    for number in range(2):
        plot.line(lower, result.counts, result.curve(number), number, **styles[number])
    lower.axhline(result.curve()[0].value, color=plot.SOFT, linewidth=0.8)
    lower.set(xlabel=f"{result.many} ablated together, of {len(result.units)}", ylabel=result.metric)
    plot.integers(lower.xaxis)
    return sheet.figure


def _map(axes: Axes, result: Ablation, layers: list[int]) -> None:
    bar = f"{result.metric} worse by"
    grid = np.full((len(layers), 1 + max(unit.head or 0 for unit in result.units)), np.nan)
    for number, unit in enumerate(result.units):
        grid[layers.index(unit.layer), unit.head] = result.harm(number).value
    most = max(float(np.nanmax(np.abs(grid))), 1e-12)
    colours = plot.colours_of(SIGNED[::-1], -most, most)
    plot.cells(axes, grid, colours, rows=[str(layer) for layer in layers], labels=("layer", "head"), bar=bar)
    go = [(result.units[n].head, layers.index(result.units[n].layer)) for n in result.can_go]
    axes.plot(*zip(*go), ".", color=plot.INK, markersize=4) if go else None
