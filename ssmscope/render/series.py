"""Series over their steps, as lines of a figure and of a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from ssmscope.render.numbers import format_range

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2f7fd0", "#d1540a", "#0f8a6c", "#b01e8a", "#97842a", "#7d8690")
"""Colours of the channels, which stand out from white and from dark."""
MANY = "#8a929b"
"""Colour of the channels of a series with more of them than there are colours."""


def channel_colours(channels: int) -> list[str]:
    """Return the colour of each channel; one for all where there are too many to tell apart."""
    return list(COLOURS[:channels]) if channels <= len(COLOURS) else [MANY] * channels


def draw_series(axes: Axes, series: np.ndarray) -> None:
    """Draw the channels of a series (length, channels) as lines over its steps, with a legend of them."""
    for at, colour in enumerate(channel_colours(series.shape[1])):
        axes.plot(range(len(series)), series[:, at], color=colour, linewidth=1, label=f"channel {at}")
    axes.set_xlim(-0.5, len(series) - 0.5)
    if series.shape[1] <= len(COLOURS):
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=series.shape[1], fontsize="small", borderaxespad=0)
    else:
        axes.set_ylabel(f"{series.shape[1]} channels")


def svg(series: np.ndarray) -> Markup:
    """Return the channels of a series (length, channels) as lines of HTML, as wide as the strips of steps below."""
    low, high = float(series.min()), float(series.max())
    unit = (high - series.astype(np.float64)) / (high - low or 1)
    colours = channel_colours(series.shape[1])
    lines = [
        Markup('<polyline points="{}" stroke="{}"><title>channel {}</title></polyline>').format(
            " ".join(f"{at + 0.5:g},{4 + 92 * place:.2f}" for at, place in enumerate(channel)), colour, name
        )
        for name, (channel, colour) in enumerate(zip(unit.T, colours))
    ]
    told = f"series of {series.shape[1]} channels, {format_range(low, high)}"
    names = Markup("").join(
        Markup('<span style="color: {}">channel {}</span> ').format(colour, at) for at, colour in enumerate(colours)
    )
    several = names if 1 < len(colours) <= len(COLOURS) else ""
    head = Markup('<p class="row"><b>series</b> {} {}</p>').format(format_range(low, high), several)
    box = '<svg class="series" viewBox="0 0 {} 100" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    return head + Markup(box).format(len(series), told, Markup("").join(lines))
