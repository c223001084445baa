"""Figure of patching over pairs: a map of layers and position classes for each site."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from ssmscope.interp.patch.result import PairPatching
from ssmscope.render import figure as plot
from ssmscope.render.colours import SIGNED
from ssmscope.render.numbers import counted


def draw(result: PairPatching, frame: plot.Frame) -> Figure:
    """Draw the means, blue where the run moves towards the other one."""
    sites = list(dict.fromkeys(result.sites))
    rows = {site: [at for at, own in enumerate(result.sites) if own == site] for site in sites}
    highs = [float(np.clip(0.24 * len(own), 0.7, 5.5)) for own in rows.values()]
    below = f"mean of {counted(result.pairs, 'pair')}; share of the way to the other run"
    sheet = plot.Sheet(frame, result.headline, below)
    most = max(1.0, float(np.nanmax(np.abs(result.values[..., 0]))))
    colours = plot.colours_of(SIGNED, -most, most)
    for axes, site in zip(sheet.panels(*highs), sites):
        layers = [str(result.layers[at]) for at in rows[site]]
        shown: dict[str, Any] = dict(rows=layers, columns=result.classes, labels=("layer", ""), bar="share")
        plot.cells(axes, result.values[rows[site], :, 0], colours, **shown)
        axes.set_title(site)
    return sheet.figure
