"""Figure of patching: a map of layers and tokens with a line for all layers above it, or a map of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator

from ssmscope.interp.grids import draw_grid
from ssmscope.render.drawing import drawable, families
from ssmscope.render.figure import COLOURS, DASHED, SOFT, Sheet, title
from ssmscope.render.signed import SIGNED
from ssmscope.render.tokens import BLUES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.interp.patch.result import Patching

LEFT, RIGHT, LINE, GAP, LETTER = 0.85, 1.3, 1.1, 0.25, 0.088
"""Room left and right of the map, height of the line's panel, gap between the two, and width of a token's character
below, in inches."""
MAX_LABELLED_TOKENS = 60
"""Largest number of tokens that are written below the map."""


def draw(result: Patching, approximated: bool = False) -> Figure:
    """Draw the exact grid, or the gradient's approximation: blue where the run moves towards the other one, orange
    where it moves away from it."""
    found = result.approximated() if approximated else result.effects()
    grid, columns = found[: result.layers], found.shape[1]
    wide = float(np.clip(0.24 * columns, 5.6, 12.0))
    high = float(np.clip(0.24 * len(grid), 0.7, 5.5))
    heads = result.site == "head"
    lined = not heads and not approximated and result.is_exact
    above = LINE + GAP if lined else 0.0
    source, into = ("clean", "corrupted") if result.direction == "denoise" else ("corrupted", "clean")
    below = "" if approximated else f"{result.flipped}; "
    below += f"{result.metric_name}; {source} patched into {into}"
    below += "; approximated by a gradient" if approximated or not result.is_exact else ""
    names = (
        []
        if heads or columns > MAX_LABELLED_TOKENS
        else [drawable(result.token(column, 9)) for column in range(columns)]
    )
    before, model, _ = title(result)
    labels = 0.55 if not names else 0.2 + LETTER * max(map(len, names))
    sheet = Sheet(
        LEFT + wide + RIGHT, Sheet.TOP + above + high + labels, (before, model, f": {result.asked}"), below, left=LEFT
    )
    low, most = _ends(result, found)
    if lined:
        axes = sheet.panel(LEFT, sheet.top, wide, LINE)
        _line(axes, result, found[-1])
    place, stops = (LEFT, sheet.top + above, wide, high), BLUES if low == 0 else SIGNED
    axes, _ = draw_grid(sheet, place, grid, (low, most), stops, labels=("layer", "head" if heads else ""))
    axes.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    if heads:
        axes.xaxis.set_major_locator(MaxNLocator(16, integer=True))
    else:
        _tokens(axes, result, names)
    return sheet.figure


def _ends(result: Patching, found: np.ndarray) -> tuple[float, float]:
    finite = found[np.isfinite(found)]
    if result.metric == "probability":
        return 0.0, 1.0
    most = max(float(np.abs(finite).max(initial=0)), 1.0 if result.metric == "normalised" else 1e-12)
    return -most, most


def _line(axes: Axes, result: Patching, values: np.ndarray) -> None:
    axes.plot(range(len(values)), values, color=COLOURS[0], linewidth=1.6, marker="o", markersize=3)
    ends = {"probability": (result.base[0], result.other[0]), "difference": (result.base[1], result.other[1])}
    for end in ends.get(result.metric, (0.0, 1.0)):
        axes.axhline(end, color=SOFT, linewidth=0.8, linestyle=DASHED)
    axes.set_xlim(-0.5, len(values) - 0.5)
    axes.tick_params(labelbottom=False)
    axes.set_ylabel("all layers", color=SOFT, size=9)


def _tokens(axes: Axes, result: Patching, names: list[str]) -> None:
    columns = len(result.positions)
    if not names:
        ticks = [at for at in range(0, columns, -(-columns // 16))]
        axes.set_xticks(ticks, [str(result.positions[at]) for at in ticks])
        axes.set_xlabel("position", color=SOFT, size=9)
        return
    axes.set_xticks(range(columns), names, rotation=90, parse_math=False, family=families("DejaVu Sans"))
    for label, place in zip(axes.get_xticklabels(), result.positions):
        if result.clean[place] != result.corrupted[place]:
            label.set_color(COLOURS[1])
