"""Ablation as a picture: a map of heads, or a row for each part, and below it what becomes of many ablated together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.ticker import MaxNLocator

from ssmscope.render.figure import DASHED, INK, SOFT, Sheet, data_line, line, points, title
from ssmscope.render.signed import SIGNED
from ssmscope.render.tokens import ramp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.interp.ablate.result import Ablation

WIDTH, LEFT, NAMES, NUMBERS, ROW, CURVE, GAP = 8.0, 0.85, 1.75, 2.0, 0.28, 2.2, 0.75
MOST_ROWS = 24
"""How many parts are shown by rows, the most important ones."""


def draw(result: Ablation) -> Figure:
    """Orange where the ablation harms; on the map a dot marks a head that can go."""
    heads = result.what == "head"
    layers = sorted({unit.layer for unit in result.units})
    shown = result.ranked[:MOST_ROWS]
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
    axes: Axes = sheet.panel(LEFT, sheet.top, wide, high, grid=None)
    grid = np.full((len(layers), 1 + max(unit.head or 0 for unit in result.units)), np.nan)
    for number, unit in enumerate(result.units):
        grid[layers.index(unit.layer), unit.head] = result.harm(number).value
    most = max(float(np.nanmax(np.abs(grid))), 1e-12)
    colours = ListedColormap(ramp(SIGNED, 257)[::-1])
    style: dict[str, Any] = dict(
        cmap=colours, vmin=-most, vmax=most, aspect="auto", interpolation="nearest", origin="lower"
    )
    picture = axes.imshow(grid, **style)
    go = [(result.units[n].head, layers.index(result.units[n].layer)) for n in result.can_go]
    axes.plot(*zip(*go), ".", color=INK, markersize=4) if go else None
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set_ylabel("layer", color=SOFT, size=9)
    axes.set_xlabel("head", color=SOFT, size=9)
    axes.xaxis.set_major_locator(MaxNLocator(16, integer=True))
    bar = sheet.figure.colorbar(picture, cax=sheet.panel(LEFT + wide + 0.2, sheet.top, 0.13, high, frame_on=False))
    bar.outline.set_visible(False)
