"""Figure of a knockout: the relative change of the answer's probability by where edges are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from ssmscope.core.bootstrap import Estimate
from ssmscope.interp.grids import draw_grid
from ssmscope.render.figure import COLOURS, DASHED, SOFT, Sheet, handle, line, title
from ssmscope.render.numbers import counted
from ssmscope.render.signed import SIGNED
from ssmscope.render.tokens import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.interp.knockout.result import Knockout

WIDTH, LEFT, HIGH, GAP = 8.0, 0.85, 2.5, 0.75

CHANGE = "relative change of probability"


def draw(result: Knockout) -> Figure:
    """Draw lines against the middle of the window, dashed for all layers at once, a panel per part; or maps of
    heads."""
    below = f"from each source to “{shorten(visible(result.target), 30)}”; dashed: in all layers at once"
    if len(result.answers) > 1:
        below += f"; {counted(len(result.answers), 'text')}, 95 % bootstrap intervals"
    names = [shorten(visible(source), 40) for source in result.sources]
    if result.by == "head":
        return _heads(result, below.split(";")[0], names)
    parts = list(dict.fromkeys(cut.part for cut in result.cuts if result.by == "window" or cut.part))
    legend = [(handle(number, **_style(number)), name) for number, name in enumerate(names)]
    sheet = Sheet(WIDTH, Sheet.TOP + (HIGH + GAP) * len(parts), title(result), below, legend, left=LEFT, across=2)
    panels: list[Axes] = []
    for number, part in enumerate(parts):
        top = sheet.top + 0.1 + number * (HIGH + GAP)
        panels.append(sheet.panel(LEFT, top, WIDTH - LEFT - 0.3, HIGH, sharey=panels[0] if panels else None))
        _lines(panels[-1], result, part)
    return sheet.figure


def _style(number: int) -> dict[str, object]:
    return {"linestyle": "-" if number < len(COLOURS) else (0, (1, 1))}


def _lines(axes: Axes, result: Knockout, part: str) -> None:
    own = [at for at, cut in enumerate(result.cuts) if cut.part == part]
    every, windows = own[0], own[1:]
    axes.axhline(0, color=SOFT, linewidth=0.8)
    for number in range(len(result.sources)):
        found = [Estimate(*ends) for ends in result.changes[number, windows].tolist()]
        line(axes, range(len(windows)), found, number, **_style(number))
        colour = COLOURS[number % len(COLOURS)]
        axes.axhline(result.changes[number, every, 0], color=colour, linewidth=1, linestyle=DASHED)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.xaxis.set_major_formatter(_numbered(result.layers))
    axes.set_xlim(-0.5, len(windows) - 0.5)
    size = int(result.provenance["options"]["window"])
    axes.set_xlabel("layer" if size == 1 else f"middle of the {size} layers that are cut", color=SOFT, size=9)
    axes.set_ylabel(CHANGE, color=SOFT, size=9)
    if part:
        axes.set_title(part, loc="left", size=9.5)


def _numbered(layers: Sequence[int]) -> FuncFormatter:
    """Format ticks as these numbers in their order."""
    return FuncFormatter(lambda at, _: str(layers[int(at)]) if 0 <= at < len(layers) else "")


def _heads(result: Knockout, below: str, names: list[str]) -> Figure:
    own = [at for at, cut in enumerate(result.cuts) if cut.head is not None]
    most = max(float(np.abs(result.changes[:, own, 0]).max()), 1e-12)
    parts = list(dict.fromkeys(result.cuts[at].part for at in own))
    heads = [1 + max(result.cuts[at].head or 0 for at in own if result.cuts[at].part == part) for part in parts]
    highs = [float(np.clip(0.22 * count, 0.8, 6.0)) for count in heads]
    height = (sum(highs) + GAP * len(parts)) * len(names)
    sheet = Sheet(WIDTH, Sheet.TOP + height + 0.2, title(result), below, left=LEFT)
    top = sheet.top + 0.15
    for number, name in enumerate(names):
        for part, count, high in zip(parts, heads, highs):
            cuts = [at for at in own if result.cuts[at].part == part]
            layers = sorted({result.cuts[at].first for at in cuts})
            grid = np.full((count, len(layers)), np.nan)
            for at in cuts:
                grid[result.cuts[at].head, layers.index(result.cuts[at].first)] = result.changes[number, at, 0]
            place, labels = (LEFT, top, WIDTH - LEFT - 1.35, high), ("head", "layer")
            axes, bar = draw_grid(sheet, place, grid, (-most, most), SIGNED, labels=labels, origin="upper")
            axes.set_title(f"from “{name}”" + f", {part}" * bool(part), loc="left", size=9.5)
            axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
            axes.xaxis.set_major_formatter(_numbered(layers))
            axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
            bar.ax.yaxis.set_major_formatter(PercentFormatter(1))
            bar.set_label(CHANGE, color=SOFT, size=9)
            top += high + GAP
    return sheet.figure
