"""Views of attention maps: the last query's weights over the tokens, readouts, and figures of whole maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.interp.attention.maps import (
    CLIP_PERCENTILE,
    MEAN_MAP,
    causal,
    coarse_note,
    heads_name,
    limit,
    mean_map,
    row_limits,
    span_name,
    strongest,
    strongest_keys,
    title,
)
from ssmscope.interp.attention.triangles import Triangles
from ssmscope.render.blocks import Block, Picture, TokenRow, TokenRows, TokenText
from ssmscope.render.colours import SIGNED
from ssmscope.render.numbers import number
from ssmscope.render.table import Cell, Line, Table, number_cell, table
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
from ssmscope.render.token_maps import MappedText, TokenMap, token_maps
from ssmscope.render.tokens import short_token

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssmscope.interp.attention.result import AttendedText, AttentionMap, ImplicitAttention
    from ssmscope.render.figure import Frame

TEXTS_PER_FIGURE, MAPS_PER_FIGURE = 4, 48
"""Number of texts in one figure, and of maps (or of rows, with chosen queries)."""
NAMED_KEYS = 5
"""Number of keys of a query that are named."""


def query_rows(result: ImplicitAttention) -> TokenRows:
    """Return a row for each chosen query of each text (of whole maps, the last); of several maps their mean
    |weight|."""
    texts, alone = [], True
    for text in result:
        shown = mean_map(text) or next(iter(text.maps), None)
        chosen = [-1] if text.whole or text.edges is not None else range(len(text.queries))
        rows = [_row(shown, at, text) for at in chosen] if shown is not None else []
        last = len(rows) == 1 and int(text.queries[-1]) == len(text) - 1
        alone &= last or not rows
        about = "; ".join(filter(None, (f"last query: {query_name(text, -1)}" if last else "", span_name(text))))
        texts.append(_text(text, rows, about))
    name = "what the last query takes from each token" if alone else "what each chosen query takes from each token"
    marked = f"its {NAMED_KEYS} strongest keys"
    return TokenRows(tuple(texts), "map", "weight", name, marked, ("negative", "positive"))


def maps_blocks(result: ImplicitAttention) -> Iterator[Block]:
    """Yield every text's maps, their mean |weight| first, and the picture, folded where a page has all texts."""
    texts = [_mapped(text, [*filter(None, [mean_map(text)]), *text.maps]) for text in result]
    legend = f"{heads_name(result)}; limit: the {CLIP_PERCENTILE:g}th percentile of |weight| of the row, or of the map"
    yield token_maps(texts, query_rows(result), result.level_name, legend)
    folded = bool(texts) and all(text.fits for text in texts)
    yield Picture(result.figure, result.headline, vector=False, folded=folded)


def _mapped(text: AttendedText, maps: Sequence[AttentionMap]) -> MappedText:
    seen = causal(text)

    def map_of(number: int) -> TokenMap:
        one = maps[number]
        found: list[list[tuple[int, float]]] = [[] for _ in text.queries]
        rows, *keys = (each.tolist() for each in strongest_keys(one.values, one.sink, seen, NAMED_KEYS))
        for row, key, weight in zip(rows, *keys):
            found[row].append((key, weight))
        return TokenMap(title(one), one.values, one.sink, *limit(one, text), row_limits(one, text), found)

    return MappedText(_text(text, (), span_name(text)), text.queries, text.edges, seen, len(maps), map_of)


def _text(text: AttendedText, rows: Sequence[TokenRow], about: str) -> TokenText:
    shown = (text.tokens, text.words, rows, text.answer, text.probability)
    return TokenText(*shown, about=about, span=text.span, pixels=text.pixels)


def _row(map_: AttentionMap, row: int, text: AttendedText) -> TokenRow:
    """Return a row of a map over the tokens, on its own scale; every token of a cell has the cell's weight."""
    query, values = int(text.queries[row]), map_.values[row]
    if text.edges is not None:
        values = np.repeat(values, np.diff(text.edges))
    state = None if map_.sink is None else float(map_.sink[row])
    end = float(row_limits(map_, text)[row])
    signed = map_.layer != MEAN_MAP
    found = [key for key, weight in strongest(map_, row, text, NAMED_KEYS) if key >= 0 and weight]
    return TokenRow(
        f"{title(map_)}\nquery {query_name(text, row)}",
        values,
        (-end if signed else 0.0, end),
        signed,
        outside=np.arange(len(text)) > query,
        marked=found if text.edges is None and text.pixels is None else (),
        query=query if text.edges is None else None,
        state=state,
    )


def query_name(text: AttendedText, row: int) -> str:
    """Name a query by its position and its token."""
    query = int(text.queries[row])
    return f"{query} “{short_token(text.tokens[query], 20)}”"


def key_name(key: int, text: AttendedText) -> str:
    """Name a key by its token, or a cell by its positions."""
    if key < 0:
        return "[state]"
    edges = text.edges
    return short_token(text.tokens[key], 16) if edges is None else f"{edges[key]}–{edges[key + 1] - 1}"


def readouts(result: ImplicitAttention) -> Table:
    """Return a row per text and map: the readouts, and the last query's strongest keys."""
    lines = []
    for at, text in enumerate(result):
        for each in text.maps:
            found, top = each.readouts, result.top
            shares = {f"last {top}": found.recent, f"first {top}": found.sink}
            shares |= {"off the mark": found.outside} if text.span is not None else {}
            cells = {}
            if not text.bidirectional:  # Distances back are undefined for layers that look ahead.
                cells["tokens back"] = replace(number_cell(found.distance), digits=1)
                cells |= {name: replace(number_cell(share), digits=3) for name, share in shares.items()}
            keys = strongest(each, -1, text, NAMED_KEYS) if len(text.queries) else []
            named = " · ".join(f"{key_name(key, text)} {number(weight)}" for key, weight in keys)
            cells["strongest for the last query"] = Cell(text=named)
            lines.append(Line((str(at), title(each)), cells))
    note = f"{heads_name(result).capitalize()}."
    if not all(text.bidirectional for text in result):
        off = ", and off the marked tokens" if any(text.span for text in result) else ""
        note += (
            " Means over the queries of where |weight| lies: how many tokens back, and its shares on the query and the "
            f"{result.top - 1} tokens before it, on the first {result.top} and the state before them{off}."
        )
    return table(("text", "map"), lines, note=" ".join(filter(None, (note, coarse_note(result)))))


def draw(result: ImplicitAttention, frame: Frame, *, start: int = 0) -> Figure:
    """Draw up to 48 maps of up to 4 texts, from number `start` on: triangles, or chosen queries over the text."""
    texts = chosen_texts(result.texts, start, TEXTS_PER_FIGURE)
    room = MAPS_PER_FIGURE // max(len(texts), 1)
    shown = [_shown(text, room) for text in texts]
    triangles = [_triangles(text, room, frame) for text in texts]
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
    named = f"Implicit attention of {result.model_name}: {result.level_name}"
    bars: list[Bar] = [(SIGNED, None, ("−limit", "limit"), "weight")]
    below = [heads_name(result), *said, rest_of(len(result), start, len(texts))]
    figure = stack(frame, named, below, parts, bars, width)
    if any(triangles) and (layout := figure.get_layout_engine()) is not None:
        layout.execute(figure)  # A single pass, before the maps are square, leaves too little room below them.
    return figure


def _whole(text: AttendedText) -> bool:
    """Return True if a text has whole maps, which are drawn as triangles."""
    cells = len(text) if text.edges is None else len(text.edges) - 1
    return len(text.queries) == cells and bool(text.maps)


def _triangles(text: AttendedText, room: int, frame: Frame) -> Triangles | None:
    return Triangles(text, text.maps[:room], frame.sides[0]) if _whole(text) else None


def _shown(text: AttendedText, room: int) -> TokenText:
    """Return the text as figures show it: with a row per map and chosen query, or without rows for whole maps."""
    whole = _whole(text)
    rows = [(map_, row) for map_ in text.maps for row in range(len(text.queries))]
    more = len(text.maps if whole else rows) - room
    what = ("map" if whole else "row") + "s" * (more > 1)
    about = "; ".join(filter(None, (span_name(text), f"{more} more {what}; the files have them" if more > 0 else "")))
    made = [] if whole else [_row(map_, row, text) for map_, row in rows[:room]]
    return _text(text, made, about or "no maps" * (not rows))
