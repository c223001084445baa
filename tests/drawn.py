"""Places of the texts of a figure: laid out as matplotlib draws it, but nothing is painted."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from ssmscope.api.results import Result
from ssmscope.render.colours import STEPS

ONE_COLUMN, TEXT_WIDTH = 3.3, 5.5
"""Widths in inches of figures in a paper."""


def drawn(result: Result, **options: Any) -> tuple[Figure, list[tuple[str, Bbox]]]:
    """The figure, and its texts with the boxes that the Agg renderer gives them; any warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = result.figure(**options)
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw_without_rendering()
    return figure, [(text.get_text(), text.get_window_extent(renderer)) for text in texts_of(figure)]


def labels(figure: Figure) -> list[str]:
    """The texts of a figure in one line each, without their places: to lay it out takes most of the time."""
    return [text.get_text().replace("\n", " ") for text in texts_of(figure)]


def parts_of(figure: Any) -> list[Any]:
    """The figure and all the parts within it."""
    return [figure, *(part for each in figure.subfigs for part in parts_of(each))]


def panels_of(figure: Figure) -> list[Axes]:
    """The axes that show something: without those of which only texts are drawn, and without colour bars."""
    return [axes for axes in figure.axes if axes.axison and not hasattr(axes, "_colorbar")]


def typed(figure: Figure) -> list[Axes]:
    """The axes with lines of tokens in boxes."""
    return [axes for axes in figure.axes if not axes.axison and axes.collections]


def said(figure: Any) -> str:
    """Everything that is written in a figure, in one line."""
    return " | ".join(text.get_text().replace("\n", " ") for text in figure.findobj(Text))


def texts_of(figure: Figure) -> list[Text]:
    texts = [text for part in parts_of(figure) for text in part.texts]
    texts += [text for part in parts_of(figure) for legend in part.legends for text in legend.get_texts()]
    texts += [text for axes in figure.axes for text in (*axes.texts, axes._left_title)]
    texts += [text for axes in figure.axes if axes.get_legend() for text in axes.get_legend().get_texts()]
    for axis in (axis for axes in figure.axes if axes.axison for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels())
        texts += [axis.label, *(label for at, label in ticks if low <= at <= high)]
    return [text for text in texts if text.get_text().strip() and text.get_visible()]


def overlapping(texts: Sequence[tuple[str, Bbox]]) -> list[tuple[str, str]]:
    """The pairs of texts that overlap by more than a pixel."""
    x0, y0, x1, y1 = np.array([box.extents for _, box in texts]).T
    apart = (x1[:, None] <= x0 + 1) | (y1[:, None] <= y0 + 1)
    rows, columns = np.nonzero(np.triu(~(apart | apart.T), 1))
    return [(texts[i][0], texts[j][0]) for i, j in zip(rows, columns)]


def outside(figure: Figure, texts: Sequence[tuple[str, Bbox]]) -> list[str]:
    """The texts that are cut off at an edge of the figure."""
    x0, y0, x1, y1 = figure.bbox.extents
    return [text for text, box in texts if not (x0 <= box.x0 and box.x1 <= x1 and y0 <= box.y0 and box.y1 <= y1)]


def assert_fits(result: Result, width: float) -> None:
    """Assert that no text of a figure of this width is cut off and none overlaps another."""
    figure, texts = drawn(result, size=width)
    assert figure.get_figwidth() == width
    assert (overlapping(texts), outside(figure, texts)) == ([], [])


def signed_levels(weights: np.ndarray, end: float) -> np.ndarray:
    """Return the shade of each weight, from −STEPS to STEPS; weights beyond the end have the last shade."""
    if end <= 0:
        return np.zeros(weights.shape, dtype=np.int64)
    return np.rint(np.clip(weights / end, -1, 1) * STEPS).astype(np.int64)
