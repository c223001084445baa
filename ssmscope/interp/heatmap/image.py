"""Scored pixels as a figure: the image, and beside it a map of the scores for the average and for each layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ssmscope.errors import InputError
from ssmscope.show.tokens import BLUES, SHADES, bounds, ramp, shades, shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.interp.heatmap.result import ScoredText, SelectionHeatmap

IMAGES = 8
"""How many images one figure holds."""
ACROSS = 5
"""How many pictures stand beside each other."""

INK, SOFT, MARK = "#1b1f24", "#57606a", "#d1540a"
SIDE, GAP, MARGIN, HEADER, HEADING, CAPTION = 1.5, 0.18, 0.2, 0.85, 0.3, 0.42


def draw(heatmap: SelectionHeatmap, *, start: int = 0) -> Figure:
    """A figure of up to 8 images, from number `start` on. Raises InputError if there is no such image."""
    if not 0 <= start < max(len(heatmap), 1):
        raise InputError(f"there is no image {start!r} to start the figure at; allowed are 0 to {len(heatmap) - 1}")
    chosen = heatmap.texts[start : start + IMAGES]
    maps = 1 + (len(heatmap.layers) if len(heatmap.layers) > 1 else 0)
    across = max(3, min(ACROSS, 1 + maps))
    lines = math.ceil((1 + maps) / across)
    each = HEADING + lines * (SIDE + CAPTION)
    rest = len(heatmap) - len(chosen)
    width = 2 * MARGIN + across * SIDE + (across - 1) * GAP
    height = HEADER + each * len(chosen) + (0.3 if rest else 0.05)
    figure = Figure(figsize=(width, height), facecolor="white")
    colours = ListedColormap(ramp(BLUES, 256))
    _header(figure, heatmap, colours)
    for row, text in enumerate(chosen):
        top = HEADER + row * each
        answer = f"{start + row + 1}   answer “{shorten(visible(text.answer), 40)}”, p = {text.probability:.3f}"
        _write(figure, MARGIN, top, answer, size=8.5, color=INK, weight="bold")
        for place, (name, scores) in enumerate(_pictures(text, heatmap)):
            left = MARGIN + (place % across) * (SIDE + GAP)
            axes = _axes(figure, left, top + HEADING + (place // across) * (SIDE + CAPTION))
            _picture(axes, text, scores, colours)
            axes.set_xlabel(name, fontsize=7, color=SOFT, labelpad=3)
    if rest:
        shown = f"images {start + 1}–{start + len(chosen)} of {len(heatmap)}; figure(start=…) draws the others"
        _write(figure, MARGIN, height - 0.25, shown, size=7.5, color=SOFT)
    return figure


def _pictures(text: ScoredText, heatmap: SelectionHeatmap) -> list[tuple[str, np.ndarray | None]]:
    """The captions and scores of an image's pictures, first the image itself."""
    single = len(heatmap.layers) == 1
    layers = [] if single else [(f"layer {n}", scores) for n, scores in zip(heatmap.layers, text.scores)]
    maps = [(heatmap.layers_name if single else "mean", text.mean), *layers]
    return [("image", None), *((f"{name}\n{bounds(scores, text.special)}", scores) for name, scores in maps)]


def _picture(axes: Axes, text: ScoredText, scores: np.ndarray | None, colours: ListedColormap) -> None:
    assert text.pixels is not None
    height, width, channels = text.pixels.shape
    if scores is None:
        grey = channels != 3
        shown = text.pixels.mean(-1) if grey else text.pixels
        axes.imshow(shown.clip(0, 1), cmap="gray" if grey else None, vmin=0, vmax=1, interpolation="nearest")
    else:
        levels = shades(scores[None], text.special)[0][~text.special].reshape(height, width)
        axes.imshow(levels, cmap=colours, vmin=0, vmax=SHADES - 1, interpolation="nearest")
        for position in text.rationale:
            corner = (position % width - 0.5, position // width - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=MARK, linewidth=1))
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=SOFT, linewidth=0.4)


def _header(figure: Figure, heatmap: SelectionHeatmap, colours: ListedColormap) -> None:
    width, height = figure.get_size_inches()
    _write(figure, MARGIN, 0.15, f"Selection: {heatmap.score_name}", size=10.5, color=INK, weight="bold")
    room = int((width - 2.3) / 0.062)
    model = shorten(str(heatmap.provenance.get("model", "")), max(room - len(heatmap.layers_name) - 3, 12))
    _write(figure, MARGIN, 0.37, f"{model} · {heatmap.layers_name}", size=8, color=SOFT)
    framed = f"framed: the top {heatmap.size} pixels of the {heatmap.layers_name} (Baleen, Eq. 10)"
    _write(figure, MARGIN, 0.55, framed, size=7, color=SOFT)
    axes = figure.add_axes(((width - MARGIN - 1.4) / width, 1 - 0.3 / height, 1.2 / width, 0.11 / height))
    scale = figure.colorbar(ScalarMappable(cmap=colours), cax=axes, orientation="horizontal", ticks=[0, 1])
    scale.outline.set_linewidth(0.4)
    axes.set_xticklabels(["lowest", "highest"], fontsize=7, color=SOFT)
    axes.tick_params(length=2, width=0.4, pad=1.5)
    axes.set_xlabel(f"{heatmap.score} in each map", fontsize=7, color=SOFT, labelpad=1)


def _axes(figure: Figure, left: float, top: float) -> Axes:
    width, height = figure.get_size_inches()
    return figure.add_axes((left / width, 1 - (top + SIDE) / height, SIDE / width, SIDE / height))


def _write(figure: Figure, x: float, y: float, text: str, **style) -> None:
    width, height = figure.get_size_inches()
    figure.text(x / width, 1 - y / height, text, va="top", parse_math=False, **style)
