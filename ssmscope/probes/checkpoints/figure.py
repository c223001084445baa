"""Figure of many checkpoints: capacity against length, and against the spectral abscissa."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.ticker import MaxNLocator

from ssmscope.probes.stability.figure import COLOURS
from ssmscope.render.figure import DASHED, INK, SOFT, Sheet, scale_steep, title
from ssmscope.render.numbers import counted
from ssmscope.render.tokens import ramp, shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.probes.checkpoints.result import Checkpoint, StabilityTable

ABSCISSA_COLOURS = ("#08306b", "#4f97cb", "#949ca5", "#e69f00", "#a50026")
"""Colours from s_A < 0 to s_A > 0; blue and red are distinct in every kind of colour vision."""
MARKS = {"stable": "o", "marginal": "s", "unstable": "^"}
WIDTH, CAPACITY_HEIGHT = 10.0, 3.95
"""Width of the figure and height of the panels of selective SSMs, in inches."""
ROW_HEIGHT, MIN_HEIGHT, UNNAMED_HEIGHT, MAX_NAMED = 0.27, 1.2, 5.0, 40
"""Height of a checkpoint's row and of the panels, in inches; more than `MAX_NAMED` checkpoints are not named."""


def draw(result: StabilityTable) -> Figure:
    """Draw growth and s_A of every readable checkpoint in rows; below, for selective SSMs only, ln C against T as lines
    coloured by s_A, and ln C against s_A as marks."""
    rows = [(name, row) for name, row in zip(result.names, result.rows) if not row.reason]
    bounded = [at for at, row in enumerate(result.rows) if row.norms is not None]
    others = len(rows) - len(bounded)
    inside = [counted(len(bounded), "selective SSM")] if bounded else []
    outside = [f"{others} outside the generalisation theorem"] if others else []
    tall = max(ROW_HEIGHT * len(rows), MIN_HEIGHT) if len(rows) <= MAX_NAMED else UNNAMED_HEIGHT
    height = 1.1 + tall + 0.7 + CAPACITY_HEIGHT * bool(bounded)
    sheet = Sheet(WIDTH, height, title(result), "; ".join(inside + outside))
    _rows(sheet, rows, tall)
    if not bounded:
        return sheet.figure
    top = 1.1 + tall + 0.95
    left, right = sheet.panel(0.75, top, 3.65, 3.1), sheet.panel(5.3, top, 3.5, 3.1)
    abscissae = np.array([row.abscissa for row in result.rows])
    known = np.abs(abscissae[np.isfinite(abscissae)])
    reach = float(np.quantile(known, 0.95)) if known.size and known.max() > 0 else 1.0
    colours = ScalarMappable(Normalize(-reach, reach), ListedColormap(ramp(ABSCISSA_COLOURS, 256)))
    _curves(left, result, bounded, colours)
    _marks(right, result, colours)
    bar = sheet.figure.colorbar(colours, cax=sheet.panel(9.1, top, 0.14, 3.1, frame_on=False), extend="both")
    bar.ax.set_title("s_A", color=SOFT, size=9, loc="left")
    bar.outline.set_visible(False)
    return sheet.figure


def _rows(sheet: Sheet, rows: Sequence[tuple[str, Checkpoint]], tall: float) -> None:
    """Draw a panel of every checkpoint's growth, and one of s_A if any has one."""
    measures = [("growth, log-gain a token", [row.growth for _, row in rows])]
    if any(math.isfinite(row.abscissa) for _, row in rows):
        measures.append(("spectral abscissa s_A", [row.abscissa for _, row in rows]))
    place = np.arange(len(rows))
    for number, (name, values) in enumerate(measures):
        axes = sheet.panel(2.3 + 3.8 * number, 1.1, 3.4, tall, grid="x")
        axes.axvline(0, color=SOFT, linewidth=0.9, linestyle=DASHED)
        for behaviour, mark in MARKS.items():
            chosen = np.array([row.behaviour == behaviour for _, row in rows])
            if chosen.any():
                colour = COLOURS[behaviour]
                axes.scatter(np.array(values)[chosen], place[chosen], c=colour, marker=mark, s=30, label=behaviour)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks([])
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlabel(name, color=SOFT, size=9)
        if not number:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, fontsize=8, frameon=False)
            if len(rows) <= MAX_NAMED:
                axes.set_yticks(place, [shorten(visible(name), 24) for name, _ in rows], parse_math=False)


def _curves(axes: Axes, result: StabilityTable, bounded: list[int], colours: ScalarMappable) -> None:
    axes.set_xlabel("tokens T", color=SOFT, size=9)
    axes.set_ylabel("ln C", color=SOFT, size=9)
    axes.set_xscale("log")
    width, opacity = (1.6, 1.0) if len(bounded) <= 10 else (0.7, 0.75)
    for at in bounded:
        curve = np.where(np.isfinite(result.curves[at]), result.curves[at], np.nan)
        colour = colours.to_rgba(np.array(result.rows[at].abscissa))
        axes.plot(result.lengths, curve, color=colour, linewidth=width, alpha=opacity)
    scale_steep(axes, result.curves[bounded])


def _marks(axes: Axes, result: StabilityTable, colours: ScalarMappable) -> None:
    default = len(result.lengths) // 2  # Without a length, C is read in the middle of the curves.
    places = [
        curve[default] if row.length is None else row.log_capacity for row, curve in zip(result.rows, result.curves)
    ]
    lengths = {row.length for row in result.rows if row.norms is not None}
    one = lengths.pop() if len(lengths) == 1 else None
    at = "each its own T" if one is None and lengths else f"T = {one or int(result.lengths[default]):,}"
    axes.set_ylabel(f"ln C, {at}", color=SOFT, size=9)
    axes.axvline(0, color=SOFT, linewidth=0.9, linestyle=DASHED)
    for behaviour, mark in MARKS.items():
        chosen = [
            (row.abscissa, y)
            for row, y in zip(result.rows, places)
            if row.behaviour == behaviour and math.isfinite(y) and not math.isnan(row.abscissa)
        ]
        if chosen:
            x, y = zip(*chosen)
            faces = colours.to_rgba(np.array(x))
            axes.scatter(x, y, c=faces, marker=mark, s=26, edgecolors=INK, linewidths=0.4, zorder=3)
    scale_steep(axes, np.array(places, dtype=np.float64))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("spectral abscissa s_A", color=SOFT, size=9)
