"""Figure of patching: a map of layers and tokens with a line for all layers above it, or a map of heads."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ssmscope.interp.patch.result import Patching
from ssmscope.render import figure as plot
from ssmscope.render.colours import BLUES, SIGNED
from ssmscope.render.letters import drawable


def draw(result: Patching, frame: plot.Frame, *, approximated: bool = False) -> Figure:
    """Draw the exact grid, or its approximation: blue where the run moves towards the other one, orange where away."""
    found = result.approximated() if approximated else result.effects()
    grid, columns = found[: result.layers], found.shape[1]
    heads = result.site == "head"
    lined = not heads and not approximated and result.is_exact
    source, into = ("clean", "corrupted") if result.direction == "denoise" else ("corrupted", "clean")
    below = f"{result.metric_name}; {source} patched into {into}"
    below += "; approximated by a gradient" if approximated or not result.is_exact else ""
    sheet = plot.Sheet(frame, result.headline, below, width=float(np.clip(0.24 * columns, 5.6, 12.0)) + 2.1)
    high = float(np.clip(0.24 * len(grid), 0.7, 5.5)) + (0.3 if not heads else 0.0)
    *above, axes = sheet.panels(*[0.9] * lined, high, sharex=True)
    for panel in above:
        _line(panel, result, found[-1])
    low, most = _ends(result, found)
    colours = plot.colours_of(BLUES if low == 0 else SIGNED, low, most)
    rows = [*map(str, result.numbers)] or None
    bar = "share" if result.metric == "normalised" else result.metric
    plot.cells(axes, grid, colours, rows=rows, labels=("layer", "head" if heads else ""), bar=bar)
    if not heads:
        _tokens(axes, result)
    return sheet.figure


def _ends(result: Patching, found: np.ndarray) -> tuple[float, float]:
    finite = found[np.isfinite(found)]
    if result.metric == "probability":
        return 0.0, 1.0
    most = max(float(np.abs(finite).max(initial=0)), 1.0 if result.metric == "normalised" else 1e-12)
    return -most, most


def _line(axes: Axes, result: Patching, values: np.ndarray) -> None:
    axes.plot(range(len(values)), values, color=plot.COLOURS[0], linewidth=1.6, marker="o", markersize=3)
    ends = {"probability": (result.base[0], result.other[0]), "difference": (result.base[1], result.other[1])}
    for end in ends.get(result.metric, (0.0, 1.0)):
        axes.axhline(end, color=plot.SOFT, linewidth=0.8, linestyle=plot.DASHED)
    axes.set_ylabel("all layers")


def _tokens(axes: Axes, result: Patching) -> None:
    """Name the tokens below the map, in colour where the two texts differ; in long texts, positions."""
    columns = len(result.positions)
    if columns > plot.MAX_NAMED:
        plot.integers(axes.xaxis, 16)
        ticks = range(0, columns, -(-columns // 16))
        axes.set_xticks(ticks, [str(result.positions[at]) for at in ticks])
        axes.set_xlabel("position")
        return
    axes.set_xticks(range(columns), [drawable(result.token(column, 9)) for column in range(columns)], rotation=90)
    for label, place, other in zip(axes.get_xticklabels(), result.positions, result.partners or result.positions):
        if result.clean[place] != result.corrupted[other]:
            label.set_color(plot.COLOURS[1])
