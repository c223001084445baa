"""Figure of an ablation: a map of heads, or a row for each part, and below it curves of parts ablated together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator

from ssmscope.interp.grids import draw_grid
from ssmscope.render.figure import DASHED, INK, SOFT, Sheet, data_line, line, points, title
from ssmscope.render.signed import SIGNED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssmscope.interp.ablate.result import Ablation

WIDTH, LEFT, NAMES, NUMBERS, ROW, CURVE, GAP = 8.0, 0.85, 1.75, 2.0, 0.28, 2.2, 0.75
MAX_ROWS = 24
"""Largest number of parts in rows, the most important ones."""


def draw(result: Ablation) -> Figure:
    """Draw the harm of each ablation, in orange on the map, where a dot marks a head that can go; and the curves
    below."""
    heads = result.what == "head"
    layers = sorted({unit.layer for unit in result.units})
    shown = result.ranked[:MAX_ROWS]
    high = float(np.clip(0.26 * len(layers), 0.8, 5.5)) if heads else ROW * len(shown)
    below = data_line(result, f"{result.metric} worse by" + ("; a dot: can go" if heads else ""))
    sheet = Sheet(WIDTH, Sheet.TOP + high + GAP + CURVE + GAP, title(result), below, left=LEFT)
    if heads:
        _map(sheet, result, layers, high)
    else:
        axes = sheet.panel(NAMES, sheet.top, WIDTH - NAMES - NUMBERS, high)
        colours = [SOFT if number in result.can_go else INK for number in shown]
        points(axes, [result.units[n].name for n in shown], [result.harm(n) for n in shown], colours)
    axes = sheet.panel(LEFT, sheet.top + high + GAP, WIDTH - LEFT - 0.3, CURVE)
    for number, name in enumerate(("least important first", "in a random order")):
        style = {"linestyle": DASHED} if number else {}
        line(axes, result.counts, result.curve(number), number, label=name, **style)
    axes.axhline(result.curve()[0].value, color=SOFT, linewidth=0.8)
    axes.set_xlabel(f"{result.many} ablated together, of {len(result.units)}", color=SOFT, size=9)
    axes.set_ylabel(result.metric, color=SOFT, size=9)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.legend(frameon=False, fontsize=8.5)
    return sheet.figure


def _map(sheet: Sheet, result: Ablation, layers: list[int], high: float) -> None:
    wide = WIDTH - LEFT - 1.2
    grid = np.full((len(layers), 1 + max(unit.head or 0 for unit in result.units)), np.nan)
    for number, unit in enumerate(result.units):
        grid[layers.index(unit.layer), unit.head] = result.harm(number).value
    most = max(float(np.nanmax(np.abs(grid))), 1e-12)
    place = (LEFT, sheet.top, wide, high)
    axes, _ = draw_grid(sheet, place, grid, (-most, most), SIGNED[::-1], labels=("layer", "head"))
    go = [(result.units[n].head, layers.index(result.units[n].layer)) for n in result.can_go]
    axes.plot(*zip(*go), ".", color=INK, markersize=4) if go else None
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.xaxis.set_major_locator(MaxNLocator(16, integer=True))
