"""Figure of the share of implicit attention on marked tokens, by map."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from ssmscope.interp.attention.maps import title
from ssmscope.interp.attention.result import DataAttention
from ssmscope.render import figure as plot


def draw(result: DataAttention, frame: plot.Frame) -> Figure:
    """Draw a point with its interval for every map."""
    return draw_all([result], [result.model_name], result.headline, frame)


def draw_all(results: Sequence[DataAttention], names: Sequence[str], headline: str, frame: plot.Frame) -> Figure:
    """Draw the maps of several models in one panel, those of one name in one row."""
    shares = [{title(each): each.share for each in result.maps} for result in results]
    rows = list(dict.fromkeys(row for own in shares for row in own))
    handles = [(plot.handle(at), each) for at, each in enumerate(names)] if len(names) > 1 else ()
    sheet = plot.Sheet(frame, headline, "means over texts, 95 % bootstrap intervals; dashed: an even share", handles)
    (axes,) = sheet.panels(plot.ROW_INCHES * max(len(rows), 3))
    plot.points(axes, rows, *[[own.get(row) for row in rows] for own in shares], notes=None if len(names) == 1 else ())
    axes.axvline(results[0].even, color=plot.SOFT, linewidth=0.9, linestyle=plot.DASHED)
    axes.set(xlabel="share on the marked tokens")
    return sheet.figure
