"""Figures as files, with the same bytes for the same figure, for pages and for papers."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

from ssmscope.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_SVG_BYTES = 300_000
"""Maximum size of an SVG in a page, in bytes; larger figures become PNGs."""

DOTS_PER_INCH = 150
"""Resolution of a PNG."""

MIN_SIDE_INCHES, MAX_SIDE_INCHES = 0.5, 100
"""Minimum and maximum length of a figure's side in inches."""

_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}


def sized(figure: Figure, size: tuple[float, float] | None) -> Figure:
    """Resize a figure to a width and height in inches; None keeps its size.

    The layout stays, and letters, lines and marks are scaled by the smaller of the two ratios, so that nothing new
    overlaps.

    Raises:
        InputError: the size is not two numbers from 0.5 to 100.
    """
    if size is None:
        return figure
    if len(size) != 2 or not all(MIN_SIDE_INCHES <= side <= MAX_SIDE_INCHES for side in size):
        raise InputError(
            f"size is {tuple(size)}; allowed are a width and a height from {MIN_SIDE_INCHES} to "
            f"{MAX_SIDE_INCHES} inches"
        )
    import numpy as np
    from matplotlib.axis import Axis, Tick
    from matplotlib.collections import Collection
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    factor = min(after / before for after, before in zip(size, figure.get_size_inches()))
    figure.canvas.draw()  # This creates all ticks.
    every = figure.findobj()
    of_ticks = {id(part) for each in every if isinstance(each, Tick) for part in each.findobj()}
    for axis in [each for each in every if isinstance(each, Axis)]:
        for tick in axis.get_major_ticks()[:1]:
            line = tick.tick1line
            axis.set_tick_params(
                which="both",
                length=factor * line.get_markersize(),
                width=factor * line.get_markeredgewidth(),
                pad=factor * tick.get_pad(),  # type: ignore[func-returns-value]
                labelsize=factor * tick.label1.get_fontsize(),
                grid_linewidth=factor * tick.gridline.get_linewidth(),
            )
        axis.labelpad *= factor
    for each in [each for each in every if id(each) not in of_ticks]:
        if isinstance(each, Text):
            each.set_fontsize(factor * each.get_fontsize())
        elif isinstance(each, Line2D):
            each.set_markersize(factor * each.get_markersize())
            each.set_linewidth(factor * each.get_linewidth())
        elif isinstance(each, Patch | Collection):
            each.set_linewidth(factor * np.asarray(each.get_linewidth()))
    figure.set_size_inches(*size)
    return figure


def drawn(figure: Figure, suffix: str) -> bytes:
    """Return the figure as "png", "svg" (with letters as outlines, so that it looks the same everywhere) or "pdf"."""
    import matplotlib

    buffer = io.BytesIO()
    # Without the salt every SVG gets other ids, and drawing a figure twice makes two different files.
    with matplotlib.rc_context({"svg.hashsalt": "ssmscope", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=suffix, dpi=DOTS_PER_INCH, metadata=_UNDATED[suffix])
    return buffer.getvalue()


def data_uri(figure: Figure, *, vector: bool = True) -> str:
    """Return the figure for the `src` of an image: an SVG if it is `vector` and not too large, else a PNG.

    The ids of an SVG within an image cannot clash with those of other figures or of the page.
    """
    if vector:
        svg = drawn(figure, "svg")
        if len(svg) <= MAX_SVG_BYTES:
            return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    return f"data:image/png;base64,{base64.b64encode(drawn(figure, 'png')).decode()}"
