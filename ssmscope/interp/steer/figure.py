"""Figure of steering: the answer's probability against the strength, and below it the cost on held-out data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ssmscope.render.figure import DASHED, SOFT, handle, line, stacked
from ssmscope.render.numbers import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssmscope.interp.steer.result import Steering


def draw(result: Steering) -> Figure:
    """Draw the direction and the mean of random ones; each random direction as a thin line."""
    order = np.argsort(result.strengths)
    at = [result.strengths[place] for place in order]
    random = len(result.by_direction) - 1
    mean = f"mean of {counted(random, 'random direction')}" + "; thin: each" * (random > 1)
    legend = [(handle(0), "direction"), (handle(1, linestyle=DASHED), mean)]
    below = "strength 1 is the difference of means; 95 % bootstrap intervals"
    title = ("Steering on ", result.model_name, f": {result.asked}, by {result.where}")
    figure, panels = stacked(title, below, legend, 1 + result.has_costs)
    for own in result.by_direction[1:]:
        panels[0].plot(at, own[order], color=SOFT, linewidth=0.6, alpha=0.6)
    found = [result.means, result.held_out] if result.has_costs else [result.means]
    names = (f"probability of {result.asked}", f"held-out {result.metric}")
    for axes, values, name in zip(panels, found, names):
        for which, style in enumerate(({}, {"linestyle": DASHED})):
            means = values(which)
            line(axes, at, [means[place] for place in order], which, **style)
        axes.axvline(0, color=SOFT, linewidth=0.8)
        axes.set_ylabel(name, color=SOFT, size=9, parse_math=False)
    panels[-1].set_xlabel("strength", color=SOFT, size=9)
    return figure
