"""Small pictures for the summary of a report: lines, bars, strips of coloured tokens, and small maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup
from ssmscope.render.blocks import TokenRow, TokenRows
from ssmscope.render.colours import BLUES, ramp, signed_shades

WIDTH, HEIGHT, LINE = 120, 26, 8
"""Size of a picture in pixels, and the height of a strip."""
MAX_STRIPS, MAX_CELLS = 3, 40


def curve(what: str, *lines: Sequence[float] | np.ndarray, ends: tuple[float, float] | None = None) -> Markup:
    """Draw lines over evenly spaced places, the second dashed, on an axis from `ends` or the lowest to the highest."""
    found = [np.asarray(line, dtype=np.float64) for line in lines]
    known = np.concatenate([line[np.isfinite(line)] for line in found])
    if not len(known):
        return Markup("")
    low, high = ends or (float(known.min()), float(known.max()))
    parts = Markup("")
    for number, line in enumerate(found):
        places = np.linspace(2, WIDTH - 2, max(len(line), 2))
        heights = HEIGHT - 3 - (HEIGHT - 6) * (line - low) / (high - low or 1)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(places, heights) if np.isfinite(y))
        dashed = Markup(' stroke-dasharray="3 2"') if number else ""
        parts += Markup('<polyline points="{}"{}/>').format(points, dashed)
    return _svg(what, HEIGHT, parts)


def bars(what: str, values: Sequence[float]) -> Markup:
    """Draw a bar per value from 0 on, up or down."""
    numbers = np.nan_to_num(np.asarray(values, dtype=np.float64))
    low, high = min(0.0, float(numbers.min())), max(0.0, float(numbers.max()))
    scale, each = (HEIGHT - 4) / (high - low or 1), (WIDTH - 4) / len(numbers)
    zero = 2 + scale * high
    parts = Markup('<line x1="2" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(WIDTH - 2, zero, zero)
    for number, value in enumerate(numbers):
        top, size = zero - scale * max(value, 0), max(scale * abs(value), 0.5)
        parts += Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
            2 + number * each + 0.1 * each, top, 0.8 * each, size
        )
    return _svg(what, HEIGHT, parts)


def strips(what: str, rows: Sequence[TokenRow]) -> Markup:
    """Draw a strip of coloured tokens for each row."""
    parts = Markup("")
    for number, row in enumerate(rows[:MAX_STRIPS]):
        colours = signed_shades() if row.signed else ramp(BLUES)
        shades = row.shades()
        each = WIDTH / len(shades)
        for at, shade in enumerate(shades.tolist()):
            if shade >= 0:
                parts += _cell(at * each, number * (LINE + 1), each, LINE, colours[shade])
    return _svg(what, min(len(rows), MAX_STRIPS) * (LINE + 1), parts)


def strips_of(what: str, block: TokenRows) -> Markup:
    """Draw the first row of each text of a block; nothing for pictures."""
    shown = [text.rows[0] for text in block.texts if text.pixels is None and len(text.rows)]
    return strips(what, shown) if shown else Markup("")


def small_map(what: str, values: np.ndarray) -> Markup:
    """Draw a map of the first rows and columns, white at 0."""
    shown = np.nan_to_num(values[:MAX_CELLS, :MAX_CELLS].astype(np.float64))
    colours, most = ramp(BLUES), float(np.abs(shown).max()) or 1.0
    height = min(2 * HEIGHT, 6 * len(shown))
    each, line = WIDTH / 2 / shown.shape[1], height / len(shown)
    parts = Markup("")
    for (row, column), value in np.ndenumerate(np.abs(shown) / most):
        if value > 0.02:
            shade = colours[round(value * (len(colours) - 1))]
            parts += _cell(column * each, row * line, each, line, shade)
    return _svg(what, height, parts)


def _cell(x: float, y: float, width: float, height: float, colour: str) -> Markup:
    return Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.2f}" height="{:.2f}" fill="{}"/>').format(
        x, y, width, height, colour
    )


def _svg(what: str, height: int, parts: Markup) -> Markup:
    return Markup(
        '<svg class="sketch" role="img" aria-label="{}" width="{}" height="{}" viewBox="0 0 {} {}">{}</svg>'
    ).format(what, WIDTH, height, WIDTH, height, parts)
