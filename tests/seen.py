"""How results look: on a terminal, and the letters of their figures."""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from rich.console import Console


def render(result: Any, width: int = 100, **options: Any) -> str:
    """What a terminal shows of a result."""
    console = Console(file=io.StringIO(), width=width, force_jupyter=False, **options)
    console.print(result)
    return console.file.getvalue()  # type: ignore[attr-defined]


def drawn(result: Any, **options: Any) -> tuple[Figure, list[tuple[str, Bbox]]]:
    """The figure, and its texts with the boxes that the Agg renderer gives them; any warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = result.figure(**options)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    texts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    for axis in (axis for axes in figure.axes if axes.axison for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
        texts += [axis.label, *(label for at, label in ticks if low <= at <= high)]
    texts = [text for text in texts if text.get_text().strip() and text.get_visible()]
    return figure, [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]


def overlap_nowhere(texts: Sequence[tuple[str, Bbox]]) -> None:
    for (one, a), (other, b) in itertools.combinations(texts, 2):
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        assert apart, (one, other)


def are_legible(figure: Figure, texts: Sequence[tuple[str, Bbox]]) -> None:
    """No text lies over another, or beyond the figure's edges."""
    overlap_nowhere(texts)
    for text, box in texts:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text


def luminance(colour: str) -> float:
    """WCAG's relative luminance of "#rrggbb"."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
