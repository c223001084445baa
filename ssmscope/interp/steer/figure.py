"""Figure of steering: the answer's probability against the strength, and below it the cost on held-out data."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from ssmscope.interp.steer.result import Steering
from ssmscope.render import figure as plot
from ssmscope.render.numbers import counted


def draw(result: Steering, frame: plot.Frame) -> Figure:
    """Draw the direction and the mean of random ones; each random direction as a thin line."""
    order = np.argsort(result.strengths)
    at = [result.strengths[place] for place in order]
    random = len(result.by_direction) - 1
    mean = f"mean of {counted(random, 'random direction')}" + "; thin: each" * (random > 1)
    legend = [(plot.handle(0), "direction"), (plot.handle(1, linestyle=plot.DASHED), mean)]
    below = "strength 1 is the difference of means; 95 % bootstrap intervals"
    sheet = plot.Sheet(frame, result.headline, below, legend)
    panels = sheet.panels(*[2.2] * (1 + result.has_costs), sharex=True)
    for own in result.by_direction[1:]:
        panels[0].plot(at, own[order], color=plot.SOFT, linewidth=0.6, alpha=0.6)
    names = (result.asked, f"held-out {result.metric}")
    for axes, values, name in zip(panels, (result.means, result.held_out), names):
        for which, style in enumerate(({}, {"linestyle": plot.DASHED})):
            means = values(which)
            plot.line(axes, at, [means[place] for place in order], which, **style)
        axes.axvline(0, color=plot.SOFT, linewidth=0.8)
        axes.set_ylabel(name)
    panels[-1].set_xlabel("strength")
    return sheet.figure
