"""Figure of a knockout: the relative change of the answer's probability by where edges are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter
from ssmscope.interp.knockout.result import Knockout
from ssmscope.render import figure as plot
from ssmscope.render.colours import SIGNED
from ssmscope.render.letters import short_name
from ssmscope.render.numbers import counted


def draw(result: Knockout, frame: plot.Frame) -> Figure:
    """Draw lines against the middle of the window, a panel per part; or maps of heads, head 0 at the bottom."""
    below = f"from each source to “{short_name(result.target, 30)}”"
    if result.by == "head":
        return _heads(result, frame, below)
    below += "; dashed: in all layers at once"
    if len(result.answers) > 1:
        below += f"; {counted(len(result.answers), 'text')}, 95 % bootstrap intervals"
    parts = list(dict.fromkeys(cut.part for cut in result.cuts if result.by == "window" or cut.part))
    legend = [(plot.handle(number), short_name(source, 40)) for number, source in enumerate(result.sources)]
    sheet = plot.Sheet(frame, result.headline, below, legend)
    panels = sheet.panels(*[2.3] * len(parts), sharey=True)
    for axes, part in zip(panels, parts):
        _lines(axes, result, part)
    size = int(result.provenance["options"]["window"])
    panels[-1].set_xlabel("layer" if size == 1 else f"middle of the {size} layers that are cut")
    return sheet.figure


def _lines(axes: Axes, result: Knockout, part: str) -> None:
    every, *windows = [at for at, cut in enumerate(result.cuts) if cut.part == part]
    layers = result.layers
    middles = [_middle(result, at) for at in windows] if len(windows) < len(layers) else range(len(windows))
    axes.axhline(0, color=plot.SOFT, linewidth=0.8)
    for number in range(len(result.sources)):
        plot.line(axes, middles, result.changes[number, windows], number)
        colour = plot.COLOURS[number % len(plot.COLOURS)]
        axes.axhline(result.changes[number, every, 0], color=colour, linewidth=1, linestyle=plot.DASHED)
    if not result.of_numbers:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    plot.integers(axes.xaxis)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: str(layers[int(at)]) if 0 <= at < len(layers) else ""))
    axes.set(xlim=(-0.5, len(layers) - 0.5), ylabel=_change(result), title=part)


def _change(result: Knockout) -> str:
    return "change of the number" if result.of_numbers else "relative change of probability"


def _middle(result: Knockout, at: int) -> int:
    """Return the place among the layers of the middle of a window, which the first or the last layer may cut off."""
    cut, layers, size = result.cuts[at], result.layers, int(result.provenance["options"]["window"])
    first, last = layers.index(cut.first), layers.index(cut.last)
    return last - size // 2 if last < len(layers) - 1 else first + (size - 1) // 2


def _heads(result: Knockout, frame: plot.Frame, below: str) -> Figure:
    own = [at for at, cut in enumerate(result.cuts) if cut.head is not None]
    most = max(float(np.abs(result.changes[:, own, 0]).max()), 1e-12)
    colours = plot.colours_of(SIGNED, -most, most)
    parts = list(dict.fromkeys(result.cuts[at].part for at in own))
    heads = [1 + max(result.cuts[at].head or 0 for at in own if result.cuts[at].part == part) for part in parts]
    highs = [float(np.clip(0.22 * count, 0.8, 6.0)) for count in heads]
    sheet = plot.Sheet(frame, result.headline, below)
    panels = iter(sheet.panels(*highs * len(result.sources)))
    for number, source in enumerate(result.sources):
        for part, count in zip(parts, heads):
            axes = next(panels)
            cuts = [at for at in own if result.cuts[at].part == part]
            layers = sorted({result.cuts[at].first for at in cuts})
            grid = np.full((count, len(layers)), np.nan)
            for at in cuts:
                grid[result.cuts[at].head, layers.index(result.cuts[at].first)] = result.changes[number, at, 0]
            names, percent = [str(layer) for layer in layers], None if result.of_numbers else PercentFormatter(1)
            shown: dict[str, Any] = {"labels": ("head", "layer"), "bar": _change(result), "format": percent}
            plot.cells(axes, grid, colours, columns=names, **shown)
            axes.set_title(f"from “{short_name(source, 40)}”" + f", {part}" * bool(part))
    return sheet.figure
