"""Figure of an attack on single texts: accuracy by the number of words that it may change."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure
from ssmscope.attacks.words.result import WordAttack
from ssmscope.render import figure as plot


def draw(result: WordAttack, frame: plot.Frame) -> Figure:
    """Draw accuracy against the number of words that an attack may change; the dashed line is the clean accuracy."""
    queries = result.queries.value
    told = "nothing was attacked" if math.isnan(queries) else f"{queries:.1f} queries per attacked example"
    clean, attacked = f"clean {result.accuracy.value:.3f}", f"under attack {result.attacked.value:.3f}"
    legend = [(plot.rule(plot.SOFT), clean), (plot.rule(plot.COLOURS[0], "-"), attacked)]
    sheet = plot.Sheet(frame, result.headline, plot.data_line(result, told), legend)
    (axes,) = sheet.panels(2.6)
    most = len(result.curve) - 1
    # Half a step on either side makes the first and the last value visible.
    edges = np.concatenate([[-0.5], np.arange(most + 1) + 0.5])
    value, low, high = np.vstack([result.curve, result.curve[-1:]]).T
    axes.fill_between(edges, low, high, step="post", color=plot.COLOURS[0], alpha=0.2, linewidth=0)
    axes.step(edges, value, where="post", color=plot.COLOURS[0], linewidth=1.8)
    axes.axhline(result.accuracy.value, color=plot.SOFT, linewidth=1, linestyle=plot.DASHED)
    plot.integers(axes.xaxis)
    axes.set(xlim=(-0.5, most + 0.5), ylim=(0, 1), ylabel="accuracy")
    axes.set_xlabel("maximum number of changed words (other attacks do not count)")
    return sheet.figure
