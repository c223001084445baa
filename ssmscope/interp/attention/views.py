"""Views of attention maps: the last query's weights over the tokens, readouts, and whole maps."""

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
from ssmscope.render.blocks import Block, Picture, TokenRow, TokenRows, TokenText
from ssmscope.render.numbers import number
from ssmscope.render.table import Cell, Line, Table, number_cell, table
from ssmscope.render.token_maps import MappedText, TokenMap, token_maps
from ssmscope.render.tokens import short_token

if TYPE_CHECKING:
    from ssmscope.interp.attention.result import AttendedText, AttentionMap, ImplicitAttention

NAMED_KEYS = 5
"""Number of keys of a query that are named."""


def query_rows(result: ImplicitAttention) -> TokenRows:
    """Return a row for each chosen query of each text (of whole maps, the last); of several maps their mean
    |weight|."""
    texts, alone = [], True
    for text in result:
        shown = mean_map(text) or next(iter(text.maps), None)
        chosen = [-1] if text.whole or text.edges is not None else range(len(text.queries))
        rows = [row_of(shown, at, text) for at in chosen] if shown is not None else []
        last = len(rows) == 1 and int(text.queries[-1]) == len(text) - 1
        alone &= last or not rows
        about = "; ".join(filter(None, (f"last query: {query_name(text, -1)}" if last else "", span_name(text))))
        texts.append(text_of(text, rows, about))
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
        return TokenMap(
            title(one), one.values, one.sink, *limit(one, text), row_limits(one, text), found, one.layer != MEAN_MAP
        )

    return MappedText(text_of(text, (), span_name(text)), text.queries, text.edges, seen, len(maps), map_of)


def text_of(text: AttendedText, rows: Sequence[TokenRow], about: str) -> TokenText:
    shown = (text.tokens, text.words, rows, text.answer, text.probability)
    return TokenText(*shown, about=about, span=text.span, pixels=text.pixels)


def row_of(map_: AttentionMap, row: int, text: AttendedText) -> TokenRow:
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
