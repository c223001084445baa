"""Figure of many checkpoints: capacity against length, and against the spectral abscissa."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from ssmscope.probes.checkpoints.result import StabilityTable
from ssmscope.probes.stability.figure import COLOURS, LEGEND_INCHES
from ssmscope.render import figure as plot
from ssmscope.render.letters import short_name
from ssmscope.render.numbers import counted

ABSCISSA_COLOURS = ("#08306b", "#4f97cb", "#949ca5", "#e69f00", "#a50026")
"""Colours from s_A < 0 to s_A > 0; blue and red are distinct in every kind of colour vision."""
MARKS = {"stable": "o", "marginal": "s", "unstable": "^"}
MIN_INCHES, UNNAMED_INCHES, CAPACITY_INCHES = 0.8, 5.0, 2.8


def draw(result: StabilityTable, frame: plot.Frame) -> Figure:
    """Draw growth and s_A of every readable checkpoint in rows and, for selective SSMs, ln C by T and by s_A."""
    rows = [(name, row) for name, row in zip(result.names, result.rows) if not row.reason]
    bounded = [at for at, row in enumerate(result.rows) if row.norms is not None]
    others = len(rows) - len(bounded)
    said = [counted(len(bounded), "selective SSM")] * bool(bounded)
    said += [f"{others} outside the generalisation theorem"] * bool(others)
    measures = {"growth, log-gain a token": [row.growth for _, row in rows]}
    if any(math.isfinite(row.abscissa) for _, row in rows):
        measures["spectral abscissa s_A"] = [row.abscissa for _, row in rows]
    named = len(rows) <= plot.MAX_NAMED
    tall = max(plot.ROW_INCHES * len(rows), MIN_INCHES) if named else UNNAMED_INCHES
    sheet = plot.Sheet(frame, result.headline, "; ".join(said), width=10.0)
    heights = (tall, CAPACITY_INCHES) if bounded else (tall,)
    panels = sheet.panels(*heights, across=len(measures) if not bounded else 2, least=LEGEND_INCHES)
    for axes, (label, values) in zip(panels, measures.items()):
        axes.grid(False, axis="y")
        _by_behaviour(axes, [row.behaviour for _, row in rows], values, range(len(rows)))
        place = axes.get_subplotspec()
        names = [short_name(name, 24) for name, _ in rows] if named and (place is None or place.is_first_col()) else []
        axes.set_yticks(range(len(names)), names)
        axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel=label)
    panels[0].legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)
    if bounded:
        known = np.abs([row.abscissa for row in result.rows if math.isfinite(row.abscissa)])
        reach = float(np.quantile(known, 0.95)) if known.size and known.max() > 0 else 1.0
        colours = plot.colours_of(ABSCISSA_COLOURS, -reach, reach)
        _curves(panels[-2], result, bounded, colours)
        _marks(panels[-1], result, colours)
        plot.colour_bar(panels[-1], colours, "s_A", extend="both")
    return sheet.figure


def _by_behaviour(
    axes: Axes, behaviours: Sequence[str], x: Sequence[float], y: Sequence[float], colours: ScalarMappable | None = None
) -> None:
    """Draw a mark per checkpoint, whose shape tells its behaviour, and the line at zero."""
    axes.axvline(0, color=plot.SOFT, linewidth=0.9, linestyle=plot.DASHED)
    for behaviour, mark in MARKS.items():
        shown = [(a, b) for each, a, b in zip(behaviours, x, y) if each == behaviour and math.isfinite(b)]
        shown = [(a, b) for a, b in shown if not math.isnan(a)]
        if shown:
            places = np.array(shown)
            faces = COLOURS[behaviour] if colours is None else colours.to_rgba(places[:, 0])
            edge: dict[str, Any] = {} if colours is None else {"edgecolors": plot.INK, "linewidths": 0.4}
            axes.scatter(places[:, 0], places[:, 1], c=faces, marker=mark, s=28, label=behaviour, zorder=3, **edge)
    axes.xaxis.set_major_locator(MaxNLocator(4))


def _curves(axes: Axes, result: StabilityTable, bounded: list[int], colours: ScalarMappable) -> None:
    plot.scale_log(axes, "x")
    width, opacity = (1.6, 1.0) if len(bounded) <= 10 else (0.7, 0.75)
    for at in bounded:
        curve = np.where(np.isfinite(result.curves[at]), result.curves[at], np.nan)
        colour = colours.to_rgba(np.array(result.rows[at].abscissa))
        axes.plot(result.lengths, curve, color=colour, linewidth=width, alpha=opacity)
    plot.scale_steep(axes, result.curves[bounded])
    axes.set(xlabel="tokens T", ylabel="ln C")


def _marks(axes: Axes, result: StabilityTable, colours: ScalarMappable) -> None:
    default = len(result.lengths) // 2  # Without a length, C is read in the middle of the curves.
    both = zip(result.rows, result.curves)
    places = [curve[default] if row.length is None else row.log_capacity for row, curve in both]
    lengths = {row.length for row in result.rows if row.norms is not None}
    one = lengths.pop() if len(lengths) == 1 else None
    at = "each its own T" if one is None and lengths else f"T = {one or int(result.lengths[default]):,}"
    abscissae = [row.abscissa for row in result.rows]
    _by_behaviour(axes, [row.behaviour for row in result.rows], abscissae, places, colours)
    plot.scale_steep(axes, np.array(places, dtype=np.float64))
    axes.set(xlabel="spectral abscissa s_A", ylabel=f"ln C, {at}")
