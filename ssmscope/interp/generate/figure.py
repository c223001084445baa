"""Figure of written texts: a map of written tokens and all earlier ones for each kind of score."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from ssmscope.interp.generate.result import Writing, WrittenText
from ssmscope.render import figure as plot
from ssmscope.render.colours import BLUES, SIGNED
from ssmscope.render.letters import drawable
from ssmscope.render.token_figure import chosen_texts, rest_of
from ssmscope.render.tokens import short_token, shorten, visible

MAX_TEXTS = 4
MAX_MAPS = 8
"""Largest number of maps of a text that are drawn."""
CLIP_PERCENTILE = 99.5
"""Percentile of |score| at which a map's colours end."""


def draw(result: Writing, frame: plot.Frame, *, start: int = 0) -> Figure:
    """Draw the maps of up to 4 texts, from number `start` on: a row for each written token, the first at the top."""
    texts = chosen_texts(result.texts, start, MAX_TEXTS)
    panels = [(at, text, map_) for at, text in enumerate(texts, start) for map_ in text.maps[:MAX_MAPS]]
    heights = [float(np.clip(0.17 * len(text.written), 1.2, 6.0)) + 0.75 for _, text, _ in panels]
    wide = max(float(np.clip(0.17 * len(text), 5.6, 12.0)) for text in texts) + 2.1
    below = "rows are written tokens, columns all tokens, the prompt left of the line; colours end at the "
    below += f"{CLIP_PERCENTILE:g}th percentile of |score|"
    below += "; " * bool(rest := rest_of(len(result), start, len(texts))) + rest
    sheet = plot.Sheet(frame, result.headline, below, width=wide)
    for axes, (at, text, map_) in zip(sheet.panels(*heights), panels):
        _map(axes, text, map_)
        said = f"text {at}, {map_.name}" if len(result) > 1 else map_.name
        axes.set_title(drawable(shorten(visible(said), 60)))
    return sheet.figure


def _map(axes, text: WrittenText, map_) -> None:
    seen = np.tri(len(text.written), len(text), text.first - 1, dtype=bool)
    most = float(np.percentile(np.abs(map_.values[seen]), CLIP_PERCENTILE, method="higher")) or map_.ends[1] or 1.0
    colours = plot.colours_of(SIGNED if map_.signed else BLUES, -most if map_.signed else 0.0, most)
    names = [drawable(short_token(token, 12)) for token in text.tokens]
    values = np.where(seen, map_.values, np.nan)
    shown: dict[str, Any] = dict(rows=names[text.first :], columns=names, labels=("written", ""))
    plot.cells(axes, values, colours, **shown, bar=drawable(short_token(map_.name, 24)))
    axes.invert_yaxis()
    axes.axvline(text.first - 0.5, color=plot.MARK, linewidth=0.8)
    if len(names) > plot.MAX_NAMED:
        axes.set_xlabel("token")
