"""Figure of a sanity check: the similarity of scores by the number of randomised parts."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from ssmscope.interp.sanity.result import MEASURES, SanityCheck
from ssmscope.render import figure as plot
from ssmscope.render.letters import short_name
from ssmscope.render.numbers import counted


def draw(result: SanityCheck, frame: plot.Frame) -> Figure:
    """Draw a panel for each measure of the correlation of each method's scores with those of the trained model."""
    names = [short_name(name, 24) for name in result.parts]
    intervals = ", 95 % bootstrap intervals" if result.texts > 1 else ""
    below = f"{counted(result.texts, 'text')}{intervals}; randomised from the head down to the named part"
    legend = [(plot.handle(at), short_name(method, 26)) for at, method in enumerate(result.methods)]
    sheet = plot.Sheet(frame, result.headline, below, legend)
    low = min(0.0, float(np.nanmin(result.estimates[..., :2]))) if np.isfinite(result.estimates).any() else 0.0
    panels = sheet.panels(2.6, across=len(MEASURES), sharey=True)
    for place, (axes, name) in enumerate(zip(panels, MEASURES.values())):
        axes.axhline(0, color=plot.SOFT, linewidth=0.8)
        for number in range(len(result.methods)):
            plot.line(axes, range(len(names)), result.estimates[number, :, place], number)
        axes.set(ylim=(low - 0.05, 1.05), title=name)
        axes.set_xticks(range(len(names)), names, rotation=90)
    panels[0].set_ylabel("Spearman's ρ to the trained model")
    return sheet.figure
