"""Attention maps as HTML: a text whose tokens show what they attend to, next to the map, in light and dark.

The page opens on the mean |weight| of a text's maps, and on the query that shows most, on its own scale. The script
fetches nothing and starts every fragment that it has not started before, so that a page can hold several results, or
one result twice. Without scripts there is the picture.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from ssmscope.interp.attention.maps import (
    CLIP_PERCENTILE,
    causal,
    heads_name,
    limit,
    mean_map,
    most_telling_row,
    row_limits,
    span_name,
    strongest,
    title,
)
from ssmscope.interp.attention.views import NAMED_KEYS, query_rows
from ssmscope.render import token_rows
from ssmscope.render.blocks import Block, Picture, TokenMaps
from ssmscope.render.colours import SIGNED, SIGNED_ON_DARK, STEPS, signed_shades
from ssmscope.render.tokens import spell_tokens, visible

if TYPE_CHECKING:
    from ssmscope.interp.attention.result import AttendedText, AttentionMap, ImplicitAttention

MAX_FRAGMENT_BYTES = 12_000_000
"""Approximate largest size of a fragment in bytes; maps that do not fit are listed."""
MAX_PAGE_TOKENS = 1500
"""Largest number of tokens of a text that is written out; longer ones are in the picture only."""
MAX_NAMED_MAPS = 12
"""Number of left-out maps that are named."""


def blocks(result: ImplicitAttention) -> Iterator[Block]:
    """Yield the interactive maps, and the picture, folded away where the maps cover every text."""
    yield TokenMaps(
        lambda colours: token_rows.terminal(query_rows(result), colours),
        lambda: fragment(result),
        token_rows.style() + _file("page.css"),
        _file("page.js"),
        tokens=[text.tokens for text in result],
        name=result.level_name,
    )
    folded = bool(len(result)) and all(map(_written_out, result))
    yield Picture(result.figure, result.headline, vector=False, folded=folded)


@lru_cache
def _file(name: str) -> str:
    return resources.files("ssmscope.interp.attention").joinpath(name).read_text(encoding="utf-8")


def _written_out(text: AttendedText) -> bool:
    return len(text) <= MAX_PAGE_TOKENS and bool(text.maps) and bool(len(text.queries))


def fragment(result: ImplicitAttention) -> Markup:
    """Return the HTML of a result's texts with as many of their maps as fit, as data."""
    sections = [_Section(number, text) for number, text in enumerate(result)]
    room = MAX_FRAGMENT_BYTES - 5000
    for section in sections:
        room -= section.enter(room)
    # In turns, so that every text has a map before one has two.
    for turn in range(max((len(section.wanted) for section in sections), default=0)):
        for section in sections:
            room -= section.add(turn, room)
    data = [section.data() for section in sections]
    packed = json.dumps(
        {"steps": STEPS, "light": signed_shades(SIGNED), "dark": signed_shades(SIGNED_ON_DARK), "texts": data}
    )
    # A "<" in the data could close the element that holds it.
    island = Markup('<script type="application/json">{}</script>').format(Markup(packed.replace("<", "\\u003c")))
    inner = Markup("").join(section.html() for section in sections)
    return Markup('<div class="ssmscope-attention texts">{}{}{}</div>').format(_legend(result), inner, island)


def _legend(result: ImplicitAttention) -> Markup:
    return Markup(
        '<p class="legend"><span>{}</span><span class="scale around">−limit <i></i> limit</span>'
        "<span>limit: the {:g}th percentile of |weight| of the row, or of the map</span>"
        "<span>in the map rows are queries, columns keys</span>"
        '<span hidden class="live">point at a token, or move with the arrow keys, to see what it attends to; click or'
        " press Enter to keep it, Escape to let go</span></p>"
        '<noscript><p class="note">The interactive maps need JavaScript; the picture is below.</p></noscript>'
    ).format(heads_name(result), CLIP_PERCENTILE)


class _Section:
    """One text in the page: its tokens, its maps, and their size."""

    def __init__(self, number: int, text: AttendedText) -> None:
        self.number, self.text = number, text
        self.written = Markup("")
        mean = mean_map(text)
        self.wanted = [*([] if mean is None else [mean]), *text.maps]
        self.maps: list[dict[str, Any]] = []
        self.left_out: list[AttentionMap] = []

    def enter(self, room: int) -> int:
        """Write the tokens out, if they fit, and return their size in bytes."""
        if not _written_out(self.text):
            return 0
        flow = _pixels(self.text) if self.text.pixels is not None else _tokens(self.text)
        size = len(flow.encode(errors="backslashreplace")) + 2000
        if size > room:
            return 0
        self.written = flow
        return size

    def add(self, index: int, room: int) -> int:
        """Add the map of that number, if there is one and it fits, and return its size in bytes."""
        if index >= len(self.wanted):
            return 0
        map_ = self.wanted[index]
        size = int(causal(self.text).sum()) * 4 // 3 + (22 + 11 * NAMED_KEYS) * len(self.text.queries) + 300
        if not self.written or size > room:
            self.left_out.append(map_)
            return 0
        self.maps.append(_packed(map_, self.text))
        return size

    def data(self) -> dict[str, Any] | None:
        """Return the script's data; None for a text that is only in the picture."""
        if not self.maps:
            return None
        text, edges = self.text, None if self.text.edges is None else self.text.edges.tolist()
        about = {"length": len(text), "queries": text.queries.tolist(), "edges": edges, "maps": self.maps}
        return {**about, "opens": most_telling_row(self.wanted[0], text)}

    def html(self) -> Markup:
        text = self.text
        shown = token_rows.answer(self.number, text.answer, text.probability, span_name(text))
        return Markup('<section data-text="{}">{}{}{}</section>').format(
            self.number, shown, self._live(), self._absent()
        )

    def _live(self) -> Markup:
        if not self.maps:
            return Markup("")
        options = [Markup('<option value="{}">{}</option>').format(at, one["name"]) for at, one in enumerate(self.maps)]
        return Markup(
            '<div hidden class="live"><p class="controls"><select aria-label="map">{}</select>'
            '<label><input type="checkbox" checked> each row on its own scale</label><span class="end"></span></p>'
            '<div class="both"><div>{}<p class="told" aria-live="polite"></p></div>'
            '<div class="map" role="img" aria-label="the map: rows are queries, columns keys"><canvas></canvas>'
            '<i class="across"></i><i class="down"></i></div></div></div>'
        ).format(Markup("").join(options), self.written)

    def _absent(self) -> Markup:
        if not self.left_out:
            return Markup("")
        names = ", ".join(title(map_) for map_ in self.left_out[:MAX_NAMED_MAPS])
        more = f" and {len(self.left_out) - MAX_NAMED_MAPS} more" if len(self.left_out) > MAX_NAMED_MAPS else ""
        why = f"A text of {len(self.text)} tokens is too long to be shown token by token; its maps"
        why = "Left out to limit the size of the page" if self.written else why
        return Markup('<p class="absent">{}: {}{}. The .json file has them.</p>').format(why, names, more)


def _packed(map_: AttentionMap, text: AttendedText) -> dict[str, Any]:
    """Encode one map for display: every row in 8 bits on its own scale, without the keys after the query; and the
    strongest keys of every row (−1 for the state, −2 where there are fewer) with their exact weights.

    A shown weight is off by at most 1/254 of the largest in its row; the result's other files hold the weights.
    """
    seen = causal(text)
    values = np.where(seen, map_.values, 0).astype(np.float64)
    scale = np.abs(values).max(axis=1, keepdims=True, initial=0.0)
    whole = np.rint(np.divide(values * 127, scale, out=np.zeros_like(values), where=scale > 0)).astype(np.int8)
    end, largest = limit(map_, text)
    keys = np.full((len(values), NAMED_KEYS), -2, dtype="<i4")
    weights = np.zeros(keys.shape, dtype="<f4")
    for row in range(len(values)):
        found = strongest(map_, row, text, NAMED_KEYS)
        keys[row, : len(found)], weights[row, : len(found)] = zip(*found)
    return {
        "name": title(map_),
        "end": end,
        "largest": largest,
        "rows": _base64(whole[seen]),
        "scale": _base64(scale[:, 0].astype("<f4")),
        "ends": _base64(row_limits(map_, text).astype("<f4")),
        "sink": None if map_.sink is None else _base64(map_.sink.astype("<f4")),
        "keys": _base64(keys),
        "weights": _base64(weights),
    }


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _tokens(text: AttendedText) -> Markup:
    """Return the running text, every token a span with its position."""
    asked = _asked(text)
    pieces = [_state(text)]
    for at, (gap, token) in enumerate(spell_tokens(text.tokens, text.words)):
        pieces.append(Markup("{}<span {}>{}</span><wbr>").format(" " if gap else "", _names(text, at, asked), token))
    return Markup('<p class="{}">{}</p>').format(_flow(text), Markup("").join(pieces))


def _pixels(text: AttendedText) -> Markup:
    """Return the image, with its tokens as a grid of pixels next to it and the other tokens after that."""
    assert text.pixels is not None
    tall, wide = text.pixels.shape[:2]
    asked, special = _asked(text), [word is None for word in text.words]
    cell, other = Markup('<span {} data-name="{}"></span>'), Markup("<span {}>{}</span> ")
    cells, others = Markup(""), Markup("")
    for at, token in enumerate(map(visible, text.tokens)):
        if special[at]:
            others += other.format(_names(text, at, asked), token)
        else:
            cells += cell.format(_names(text, at, asked), token)
    side = max(4, min(16, 300 // max(tall, wide, 1)))
    return Markup(
        '<div class="{}"><div class="image"><img alt="the image" width="{}" height="{}" src="{}">'
        '<div class="grid" style="grid-template-columns: repeat({}, {}px); grid-auto-rows: {}px">{}</div></div>'
        "<p>{}{}</p></div>"
    ).format(_flow(text), wide * side, tall * side, _image(text.pixels), wide, side, side, cells, _state(text), others)


def _image(pixels: np.ndarray) -> str:
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    shown = pixels if pixels.shape[2] == 3 else pixels.mean(-1, keepdims=True).repeat(3, axis=-1)
    imsave(buffer, shown.clip(0, 1), format="png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _state(text: AttendedText) -> Markup:
    sunk = any(map_.sink is not None for map_ in text.maps)
    return Markup('<span class="state">state</span> ') if sunk else Markup("")


def _flow(text: AttendedText) -> str:
    """Return the class of the element that holds the tokens: "few" where only some have a row and are underlined."""
    return "tokens" if len(_asked(text)) == len(text) else "tokens few"


def _asked(text: AttendedText) -> set[int]:
    """Return the tokens that have a row: the queries, or all tokens of pooled maps."""
    return set(range(len(text))) if text.edges is not None else set(text.queries.tolist())


def _names(text: AttendedText, at: int, asked: set[int]) -> Markup:
    names = ["asked"] * (at in asked) + ["special"] * (text.words[at] is None)
    names += ["marked"] * (text.span is not None and text.span[0] <= at < text.span[1])
    focus = Markup(' tabindex="-1"') if at in asked else ""
    return Markup('data-i="{}" class="{}"{}').format(at, " ".join(names), focus)
