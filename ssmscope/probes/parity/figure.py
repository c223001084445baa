"""Figure of parity: every tensor's error against what rounding allows."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from ssmscope.probes.parity.result import Parity
from ssmscope.render import figure as plot

MAX_NAMED = 40


def draw(result: Parity, frame: plot.Frame) -> Figure:
    """Draw the error of each tensor, in the order in which they are computed, and the line of what is allowed."""
    sheet = plot.Sheet(frame, result.headline, "a dot above its bar differs", width=8)
    (axes,) = sheet.panels(2.8)
    places = np.arange(len(result.tensors))
    tiny = np.finfo(np.float64).tiny
    errors, allowed = (np.array([getattr(each, of) for each in result.tensors]) for of in ("error", "allowed"))
    shown = np.where(np.isfinite(errors) & (errors > 0), errors, np.nan)
    low = np.nanmin(np.r_[shown[np.isfinite(shown)], allowed[allowed > 0], 1.0]) / 3
    axes.bar(places, np.maximum(allowed, tiny) - low, bottom=low, color=plot.GRID, width=0.8)
    over = np.array([each.over > 0 for each in result.tensors])
    axes.plot(places[~over], shown[~over], "o", color=plot.COLOURS[0], markersize=4)
    axes.plot(places[over], np.nan_to_num(shown[over], nan=1.0), "D", color=plot.COLOURS[1], markersize=4)
    axes.set_yscale("log")
    axes.set_ylim(bottom=low)
    if len(places) <= MAX_NAMED:
        axes.set_xticks(places, [each.name for each in result.tensors], rotation=90)
    axes.set(ylabel="error / rms", xlabel="" if len(places) <= MAX_NAMED else "tensor")
    return sheet.figure
