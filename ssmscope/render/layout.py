"""Constrained layout that breaks the titles and axis labels of panels into lines where they are wider than their room."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

MIN_LETTERS, MAX_PASSES = 8, 3
GAP_PIXELS = 2.0


class FittedLayout(ConstrainedLayoutEngine):
    """Constrained layout, which knows only the heights of titles and labels, with room for their widths."""

    def execute(self, fig: Figure) -> None:
        """Lay the figure out, and again once a title or label has been broken into lines."""
        whole: dict[Text, str] = {}
        for _ in range(MAX_PASSES):
            super().execute(fig)
            if not _break_lines(fig, whole):
                return


def _break_lines(figure: Figure, whole: dict[Text, str]) -> bool:
    """Break what is wider than its room: up to the edge of its part of the figure or halfway to the next panel. Return
    whether anything changed; `whole` holds what has been broken as it was before."""
    boxes: dict[Axes, Bbox] = {}
    changed = False
    for axes in figure.axes:
        for text, along in _texts(axes):
            own, size = _span(axes.bbox, along), _span(text.get_window_extent(), along)
            if size[1] - size[0] <= own[1] - own[0]:
                continue
            boxes = boxes or {each: box for each in figure.axes if (box := each.get_tightbbox()) is not None}
            low, high = _limits(axes, text, along, boxes)
            middle = (own[0] + own[1]) / 2
            room = high - own[0] if text.get_ha() == "left" else 2 * min(middle - low, high - middle)
            changed |= _break(text, whole.setdefault(text, text.get_text()), along, room - GAP_PIXELS)
    return changed


def _texts(axes: Axes) -> Iterator[tuple[Text, int]]:
    """Yield the title and the axes' labels, and along which side of the picture each runs: 0 or 1."""
    title = axes.get_title("left")
    if title:
        yield next(each for each in axes.get_children() if isinstance(each, Text) and each.get_text() == title), 0
    if axes.axison:
        yield from ((label, along) for along, label in enumerate((axes.xaxis.label, axes.yaxis.label)) if label.get_text())


def _span(box: Bbox, along: int) -> tuple[float, float]:
    return (box.x0, box.x1) if along == 0 else (box.y0, box.y1)


def _limits(axes: Axes, text: Text, along: int, boxes: dict[Axes, Bbox]) -> tuple[float, float]:
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


def _break(text: Text, said: str, along: int, room: float) -> bool:
    """Write what a text says in lines no longer than `room` pixels, where its words allow it; return whether it
    changed."""
    before, lines = text.get_text(), said.split("\n")
    letters = max(map(len, before.split("\n")))
    while (size := _span(text.get_window_extent(), along))[1] - size[0] > room and letters > MIN_LETTERS:
        letters = max(min(letters - 1, int(letters * room / (size[1] - size[0]))), MIN_LETTERS)
        text.set_text("\n".join(textwrap.fill(line, letters, break_long_words=False) for line in lines))
    return text.get_text() != before
