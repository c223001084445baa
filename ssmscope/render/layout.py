"""Constrained layout that gives titles, axis labels and ticks of panels no more than their room."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, MaxNLocator
from matplotlib.transforms import BboxBase
from ssmscope.errors import InputError

MIN_LETTERS, MAX_PASSES = 8, 5
GAP_PIXELS = 2.0
TICK_GAP = 0.5
"""Least distance of tick labels as a share of their height."""


class FittedLayout(ConstrainedLayoutEngine):
    """Constrained layout that also breaks titles and labels into lines, and thins out ticks whose labels overlap."""

    def __init__(self, **pads: Any) -> None:
        """Take matplotlib's pads."""
        super().__init__(**pads)
        self._broken: dict[Text, tuple[str, str]] = {}

    def execute(self, fig: Figure) -> None:
        """Lay the figure out, and again once a text or the ticks have changed."""
        super().execute(fig)
        for _ in range(MAX_PASSES):
            thinned = [_thin_ticks(axes) for axes in fig.axes if axes.axison]
            if not (_break_lines(fig, self._broken) or any(thinned)):
                return
            super().execute(fig)


def _thin_ticks(axes: Axes) -> bool:
    """Ask for fewer ticks below the axes if labels overlap and a locator chose them; return whether it did."""
    axis, (low, high) = axes.xaxis, sorted(axes.get_xlim())
    locator = axis.get_major_locator()
    if not isinstance(locator, LogLocator | MaxNLocator):
        return False
    ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels())
    shown = [label for at, label in ticks if low <= at <= high and label.get_visible() and label.get_text()]
    boxes = sorted((label.get_window_extent() for label in shown), key=lambda box: box.x0)
    if all(box.x1 < after.x0 for box, after in zip(boxes, boxes[1:])):
        return False
    widest = max(box.width + TICK_GAP * box.height for box in boxes)
    count = max(min(int(axes.bbox.width / widest), len(boxes) - 1), 1)
    if isinstance(locator, LogLocator):
        locator.set_params(numticks=count)
    else:
        locator.set_params(nbins=count)
    return True


def _break_lines(figure: Figure, broken: dict[Text, tuple[str, str]]) -> bool:
    """Break what is wider than its room: up to the edge of its part of the figure or halfway to the next panel. Return
    whether anything changed; `broken` holds what was said and what has been made of it."""
    boxes: dict[Axes, BboxBase] = {}
    changed = False
    for axes in figure.axes:
        for text, along in _texts(axes):
            own, size = _span(axes.bbox, along), _span(text.get_window_extent(), along)
            if size[1] - size[0] <= own[1] - own[0]:
                continue
            boxes = boxes or {each: box for each in figure.axes if (box := each.get_tightbbox()) is not None}
            low, high = _limits(axes, text, along, boxes)
            middle = (own[0] + own[1]) / 2
            room = high - own[0] if text.get_horizontalalignment() == "left" else 2 * min(middle - low, high - middle)
            before = text.get_text()
            said, made = broken.get(text, (before, before))
            said = said if made == before else before
            _break(text, said, along, room - GAP_PIXELS)
            broken[text] = (said, text.get_text())
            changed |= text.get_text() != before
    return changed


def _texts(axes: Axes) -> Iterator[tuple[Text, int]]:
    """Yield the title and the axes' labels, and along which side of the picture each runs: 0 or 1."""
    title = axes.get_title("left")
    if title:
        yield next(each for each in axes.get_children() if isinstance(each, Text) and each.get_text() == title), 0
    if axes.axison:
        labels = (axes.xaxis.label, axes.yaxis.label)
        yield from ((label, along) for along, label in enumerate(labels) if label.get_text())


def _span(box: BboxBase, along: int) -> tuple[float, float]:
    return (box.x0, box.x1) if along == 0 else (box.y0, box.y1)


def _limits(axes: Axes, text: Text, along: int, boxes: dict[Axes, BboxBase]) -> tuple[float, float]:
    """Return between which pixels a text may stand."""
    low, high = _span(axes.figure.bbox, along)
    first, last = _span(axes.bbox, along)
    start, end = _span(boxes[axes], along)
    below, above = _span(text.get_window_extent(), 1 - along)
    for other, box in boxes.items():
        side = _span(box, 1 - along)
        if other is axes or side[1] <= below or side[0] >= above:
            continue
        near, far = _span(box, along)
        if near >= last:
            high = min(high, near, (end + near) / 2)
        elif far <= first:
            low = max(low, far, (start + far) / 2)
    return low, high


def _break(text: Text, said: str, along: int, room: float) -> None:
    """Write `said` in lines no longer than `room` pixels, where its words allow it, unless the text fits as it is."""
    letters, lines = max(map(len, text.get_text().split("\n"))), said.split("\n")
    while (size := _span(text.get_window_extent(), along))[1] - size[0] > room and letters > MIN_LETTERS:
        letters = max(min(letters - 1, int(letters * room / (size[1] - size[0]))), MIN_LETTERS)
        text.set_text("\n".join(textwrap.fill(line, letters, break_long_words=False) for line in lines))


def in_place_of(ax: Axes) -> SubFigure:
    """Remove axes, and return a part of their figure in their place."""
    place, figure = ax.get_subplotspec(), ax.get_figure()
    if place is None or figure is None:
        said = "ax: this figure has several panels, and these axes stand where they are put by hand: give axes of"
        raise InputError(f"{said} subplots(), a part of a figure (matplotlib's subfigures()), or none")
    ax.remove()
    if figure.get_layout_engine() is None:
        figure.get_figure(root=True).set_layout_engine("constrained")
    return figure.add_subfigure(place)


def inches(part: SubFigure) -> tuple[float, float]:
    """Return width and height of a part of a figure."""
    dpi = part.get_figure(root=True).dpi
    return part.bbox.width / dpi, part.bbox.height / dpi
