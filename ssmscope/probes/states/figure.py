"""Figure of the norms of states by layer."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from ssmscope.probes.states.result import StateNorms
from ssmscope.render import figure as plot

MAX_LINES = len(plot.COLOURS)


def draw(result: StateNorms, frame: plot.Frame) -> Figure:
    """Draw the norm of each layer's recurrent states, a line for each text and token up to `MAX_LINES`."""
    layers, norms = result.recurrent
    shown = result.rows[:MAX_LINES]
    names = [f"after token {position} of text {text}" for text, position, _ in shown]
    legend = [(plot.handle(at), name) for at, name in enumerate(names)]
    more = f"the first {len(shown)} of {len(result.rows)} rows" if len(result.rows) > len(shown) else ""
    sheet = plot.Sheet(frame, result.headline, more, legend)
    (axes,) = sheet.panels(2.6)
    places = np.arange(len(layers))
    for at in range(len(shown)):
        axes.plot(places, norms[at], **plot.look(at))
    axes.set_xticks(places, [name.rpartition("layers.")[2] for name in layers])
    axes.set(xlabel="layer", ylabel="norm of the layer's states")
    return sheet.figure
