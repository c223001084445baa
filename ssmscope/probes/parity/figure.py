"""Figure of parity: every tensor's error against what rounding allows."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from ssmscope.probes.parity.result import MODE, Parity
from ssmscope.render import figure as plot

MAX_NAMED = 40


def draw(result: Parity, frame: plot.Frame) -> Figure:
    """Draw the error of each tensor, in the order in which they are computed, and the line of what is allowed."""
    sheet = plot.Sheet(
        frame, result.headline, "grey: allowed; a dot above its bar differs; at the lower edge: 0", width=8
    )
    names = [each.name.removeprefix(MODE) for each in result.tensors]
    (axes,) = sheet.panels(2.0 + 0.07 * max(map(len, names)))
    places = np.arange(len(result.tensors))
    tiny = np.finfo(np.float64).tiny
    errors, allowed = (np.array([getattr(each, of) for each in result.tensors]) for of in ("error", "allowed"))
    low = np.concatenate([errors[np.isfinite(errors) & (errors > 0)], allowed[allowed > 0], [1.0]]).min() / 3
    shown = np.maximum(np.where(np.isfinite(errors), errors, 1.0), low)
    axes.bar(places, np.maximum(allowed, tiny) - low, bottom=low, color=plot.GRID, width=0.8)
    over = np.array([each.over > 0 for each in result.tensors])
    axes.plot(places[~over], shown[~over], "o", color=plot.COLOURS[0], markersize=4, clip_on=False)
    axes.plot(places[over], shown[over], "D", color=plot.COLOURS[1], markersize=4)
    axes.set_yscale("log")
    axes.set_ylim(bottom=low)
    if len(places) <= MAX_NAMED:
        axes.set_xticks(places, names, rotation=90)
    axes.set(ylabel="error / rms", xlabel="" if len(places) <= MAX_NAMED else "tensor")
    return sheet.figure
