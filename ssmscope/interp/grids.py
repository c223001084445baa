"""Figures of grids: layers by tokens or heads in the colours of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from matplotlib.colors import ListedColormap

from ssmscope.render.figure import SOFT, Sheet
from ssmscope.render.tokens import ramp

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar

BAR_GAP, BAR_WIDTH = 0.2, 0.13
"""Distance of a colour bar from its grid, and its width, in inches."""


def draw_grid(
    sheet: Sheet,
    place: tuple[float, float, float, float],
    values: np.ndarray,
    ends: tuple[float, float],
    stops: Sequence[str],
    *,
    labels: tuple[str, str],
    origin: Literal["lower", "upper"] = "lower",
) -> tuple[Axes, Colorbar]:
    """Draw values (rows, columns) as a map with a colour bar on its right.

    Args:
        place: left, top, width and height of the map, in inches from the sheet's upper left.
        ends: values of the first and the last colour.
        stops: colours that the scale passes through.
        labels: names of the rows and of the columns.
        origin: side of the first row, "lower" or "upper".
    """
    left, top, width, height = place
    axes = sheet.panel(left, top, width, height, grid=None)
    colours = ListedColormap(ramp(stops, 257))
    low, high = ends
    picture = axes.imshow(
        values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest", origin=origin
    )
    axes.set_ylabel(labels[0], color=SOFT, size=9)
    axes.set_xlabel(labels[1], color=SOFT, size=9)
    beside = sheet.panel(left + width + BAR_GAP, top, BAR_WIDTH, height, frame_on=False)
    bar = sheet.figure.colorbar(picture, cax=beside)
    bar.outline.set_visible(False)
    return axes, bar
