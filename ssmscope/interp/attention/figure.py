"""Figure of attention maps: triangles of whole maps, or chosen queries over the text."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ssmscope.interp.attention.maps import CLIP_PERCENTILE, AttendedText, span_name
from ssmscope.interp.attention.result import NAMED_KEYS, ImplicitAttention, heads_name, row_of, text_of
from ssmscope.interp.attention.triangles import Triangles
from ssmscope.render.blocks import TokenText
from ssmscope.render.colours import SIGNED
from ssmscope.render.figure import HEIGHT_SHARE_IN_AXES, Frame
from ssmscope.render.token_figure import (
    MIN_INCHES,
    Bar,
    Columns,
    Part,
    chosen_texts,
    heading,
    rest_of,
    stack,
    text_parts,
)

TEXTS_PER_FIGURE, MAPS_PER_FIGURE = 4, 48
"""Number of texts in one figure, and of maps (or of rows, with chosen queries)."""


def draw(result: ImplicitAttention, frame: Frame, *, start: int = 0) -> Figure:
    """Draw up to 48 maps of up to 4 texts, from number `start` on: triangles, or chosen queries over the text."""
    texts = chosen_texts(result.texts, start, TEXTS_PER_FIGURE)
    room = MAPS_PER_FIGURE // max(len(texts), 1)
    shown = [_shown(text, room) for text in texts]
    triangles = [Triangles(text, text.maps[:room], frame.sides[0]) if _whole(text) else None for text in texts]
    columns = Columns.fitting(frame, shown)
    width = max([columns.inches, MIN_INCHES, *(each.inches for each in triangles if each)])
    parts: list[Part] = []
    for at, (text, whole) in enumerate(zip(shown, triangles), start=start):
        found = [heading(at, text, columns), *whole.parts(text, columns)] if whole else text_parts(at, text, columns)
        parts += found
    said = ["rows are queries, columns keys"] * any(triangles)
    said.append(f"limit: the {CLIP_PERCENTILE:g}th percentile of |weight| of each {'map' if any(triangles) else 'row'}")
    if not any(triangles) and any(text.pixels is None for text in texts):
        said.append(f"underlined: the {NAMED_KEYS} strongest")
    if any(each.fold > 1 for each in triangles if each):
        said.append("several weights share a dot, which shows the strongest of them")
    bars: list[Bar] = [(SIGNED, None, ("−limit", "limit"), "weight")]
    below = [heads_name(result), *said, rest_of(len(result), start, len(texts))]
    # Square maps that get less than their room collapse the layout of the whole figure.
    in_axes = any(triangles) and isinstance(frame.ax, Axes)
    figure = stack(
        frame, result.headline, below, parts, bars, width, least=0.9 / HEIGHT_SHARE_IN_AXES if in_axes else 0.9
    )
    if any(triangles) and (layout := figure.get_layout_engine()) is not None:
        layout.execute(figure)  # A single pass, before the maps are square, leaves too little room below them.
    return figure


def _whole(text: AttendedText) -> bool:
    """Return True if a text has whole maps, which are drawn as triangles."""
    cells = len(text) if text.edges is None else len(text.edges) - 1
    return len(text.queries) == cells and bool(text.maps)


def _shown(text: AttendedText, room: int) -> TokenText:
    """Return the text as figures show it: with a row per map and chosen query, or without rows for whole maps."""
    whole = _whole(text)
    rows = [(map_, row) for map_ in text.maps for row in range(len(text.queries))]
    more = len(text.maps if whole else rows) - room
    what = ("map" if whole else "row") + "s" * (more > 1)
    about = "; ".join(filter(None, (span_name(text), f"{more} more {what}; the files have them" if more > 0 else "")))
    made = [] if whole else [row_of(map_, row, text) for map_, row in rows[:room]]
    return text_of(text, made, about or "no maps" * (not rows))
