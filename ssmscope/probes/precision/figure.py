"""Figure of precision: the change of the loss by rounding, and heads that break."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from ssmscope.probes.precision.result import MARGIN, Precision
from ssmscope.render import figure as plot
from ssmscope.render.colours import BLUES
from ssmscope.render.numbers import brackets, number


def draw(result: Precision, frame: plot.Frame) -> Figure:
    """Draw the change of the loss of every rounding with its interval, and below a map of the heads rounded alone."""
    below = f"dashed: {MARGIN} nats; 95 %, bootstrap over windows"
    sheet = plot.Sheet(frame, result.headline, below, width=8)
    rows = [max(plot.ROW_INCHES * len(result.arms), 1.0)]
    rows += [max(0.22 * len(result.layers), 0.8)] if result.heads.size else []
    axes, *maps = sheet.panels(*rows)
    changes = [arm.change for arm in result.arms]
    notes = [number(each.value, 4) + brackets(each, 4) for each in changes]
    plot.points(axes, [arm.label for arm in result.arms], changes, notes=notes)
    axes.axvline(MARGIN, color=plot.SOFT, linewidth=0.9, linestyle=plot.DASHED)
    axes.set_xlabel("change of the loss, nats a token")
    for panel in maps:
        most = float(np.nanmax(result.heads)) or 1.0
        name = f"head, each alone in {result.heads_in}"
        layers = [str(layer) for layer in result.layers]
        plot.cells(
            panel, result.heads, plot.colours_of(BLUES, 0, most), rows=layers, labels=("layer", name), bar="|change|"
        )
    return sheet.figure
