"""Figure of a sanity check: the similarity of scores by the number of randomised parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ssmscope.core.bootstrap import Estimate
from ssmscope.interp.sanity.result import MEASURES
from ssmscope.render.figure import COLOURS, DASHED, INK, SOFT, Sheet, handle, line
from ssmscope.render.numbers import counted
from ssmscope.render.tokens import shorten, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssmscope.interp.sanity.result import SanityCheck

WIDTH, LEFT, HIGH, GAP = 8.6, 0.75, 2.4, 0.3


def draw(result: SanityCheck) -> Figure:
    """Draw the correlation of each method's scores with those of the trained model against the randomised parts; a
    panel, with its title, for each measure."""
    names = [shorten(visible(name), 24) for name in result.parts]
    below = 0.3 + 0.062 * max(map(len, names)) + 0.25
    intervals = ", 95 % bootstrap intervals" if result.texts > 1 else ""
    described = f"{counted(result.texts, 'text')}{intervals}; randomised from the head down to the named part"
    title = ("Scores after randomising the weights of ", result.model_name, "")
    legend = [(handle(at, **_style(at)), shorten(visible(method), 26)) for at, method in enumerate(result.methods)]
    height = Sheet.TOP + GAP + HIGH + below
    sheet = Sheet(WIDTH, height, title, described, legend, left=LEFT, across=4)
    wide = (WIDTH - LEFT - 0.25 - GAP) / 2
    low = min(0.0, float(np.nanmin(result.estimates[..., :2]))) if np.isfinite(result.estimates).any() else 0.0
    for place, name in enumerate(MEASURES.values()):
        axes = sheet.panel(LEFT + place * (wide + GAP), sheet.top + GAP, wide, HIGH)
        axes.axhline(0, color=SOFT, linewidth=0.8)
        for number in range(len(result.methods)):
            found = [Estimate(*ends) for ends in result.estimates[number, :, place].tolist()]
            line(axes, range(len(names)), found, number, **_style(number))
        axes.set_ylim(low - 0.05, 1.05)
        axes.set_xticks(range(len(names)), names, rotation=90, parse_math=False)
        axes.set_title(name, loc="left", size=9, color=INK)
        axes.tick_params(labelleft=not place)
        if not place:
            axes.set_ylabel("Spearman's ρ to the trained model", color=SOFT, size=8.5)
    return sheet.figure


def _style(number: int) -> dict[str, object]:
    """Return the line style of a method: dashed once the colours are used up."""
    return {"linestyle": "-" if number < len(COLOURS) else DASHED}
