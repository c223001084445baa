"""Figure of a circuit: its parts from the embedding up to the logits, and its edges by road."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from ssmscope.interp.circuit.result import SINGLE, Circuit
from ssmscope.render import figure as plot
from ssmscope.render.numbers import counted

MAX_DRAWN = 60
"""Edges of the circuit that are drawn, the strongest."""


def draw(result: Circuit, frame: plot.Frame) -> Figure:
    """Draw parts in the order of their runs, and an arc for each edge, as wide as its share and coloured by road."""
    edges = result.circuit[:MAX_DRAWN]
    share = dict(zip(result.edges, np.abs(result.scores[:, 0])))
    used = {edge.sender for edge in edges} | {edge.receiver for edge in edges}
    nodes = [node for node in result.nodes if node in used or node in ("embedding", "logits")]
    place = {node: at for at, node in enumerate(nodes)}
    roads = list(dict.fromkeys(edge.road for edge in edges))
    legend = [(plot.handle(number), road or SINGLE) for number, road in enumerate(roads)]
    below = f"{counted(result.pairs, 'pair')}; width: share of the answer"
    below += f"; the strongest {MAX_DRAWN} edges" * (int(result.kept.sum()) > MAX_DRAWN)
    sheet = plot.Sheet(frame, result.headline, below, legend)
    (axes,) = sheet.panels(float(np.clip(0.55 * len(nodes), 1.6, 9.0)))
    most = max([float(share[edge]) for edge in edges], default=1.0) or 1.0
    for number, edge in enumerate(edges):
        start, end = place[edge.sender], place[edge.receiver]
        side = 1 if number % 2 else -1
        bend = side * float(np.clip(0.25 + 0.12 * (roads.index(edge.road) // 2), 0, 0.6))
        colour = plot.COLOURS[roads.index(edge.road) % len(plot.COLOURS)]
        arrow = FancyArrowPatch(
            (0.0, start + 0.16), (0.0, end - 0.16), connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>",
            mutation_scale=8, color=colour, linewidth=0.6 + 2.4 * float(share[edge]) / most,
        )  # fmt: skip
        axes.add_patch(arrow)
    for node, at in place.items():
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": plot.SOFT}
        axes.text(0.0, at, node, ha="center", va="center", bbox=box)
    axes.set(xlim=(-1.5, 1.5), ylim=(-0.5, len(nodes) - 0.5))
    axes.axis("off")
    return sheet.figure
