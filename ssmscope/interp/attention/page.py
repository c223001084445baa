"""Attention maps as HTML: a text whose tokens show what they attend to, beside the map, in light and dark.

The page opens on the mean |weight| of a text's maps, and on the query that shows most, on its own scale. The one script
fetches nothing and starts every piece that it has not started before, so that several results, or one shown twice, work
beside each other. Where no script runs there is the picture.
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
    CLIPPED,
    averaged,
    causal,
    heads_name,
    limit,
    row_limits,
    span_name,
    strongest,
    telling,
    title,
)
from ssmscope.interp.attention.views import STRONGEST, query_rows
from ssmscope.render import token_rows
from ssmscope.render.blocks import Block, Picture, TokenMaps
from ssmscope.render.signed import SIGNED, SIGNED_ON_DARK, STEPS, shades
from ssmscope.render.tokens import visible, written

if TYPE_CHECKING:
    from ssmscope.interp.attention.result import AttendedText, AttentionMap, ImplicitAttention

BUDGET = 12_000_000
"""How many bytes a fragment has about at most; maps that do not fit are listed."""
TEXT_TOKENS = 1500
"""How many tokens a text has at most that is written out; of longer ones there is the picture."""
NAMED = 12
"""How many of the maps that are left out are named."""


def blocks(result: ImplicitAttention) -> Iterator[Block]:
    """What is pointed at, and the picture, which is folded away where that has every text."""
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
    return len(text) <= TEXT_TOKENS and bool(text.maps) and bool(len(text.queries))


def fragment(result: ImplicitAttention) -> Markup:
    """The texts of a result with their maps as data; as many as fit."""
    sections = [_Section(number, text) for number, text in enumerate(result)]
    room = BUDGET - 5000
    for section in sections:
        room -= section.enter(room)
    # In turns, so that every text has a map before one has two.
    for turn in range(max((len(section.wanted) for section in sections), default=0)):
        for section in sections:
            room -= section.add(turn, room)
    data = [section.data() for section in sections]
    packed = json.dumps({"steps": STEPS, "light": shades(SIGNED), "dark": shades(SIGNED_ON_DARK), "texts": data})
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
        '<noscript><p class="note">Maps to point at need scripts; the picture is below.</p></noscript>'
    ).format(heads_name(result), CLIPPED)


class _Section:
    """One text: what of it is in the page, and how long that is."""

    def __init__(self, number: int, text: AttendedText) -> None:
        self.number, self.text = number, text
        self.written = Markup("")
        mean = averaged(text)
        self.wanted = [*([] if mean is None else [mean]), *text.maps]
        self.maps: list[dict[str, Any]] = []
        self.left_out: list[AttentionMap] = []

    def enter(self, room: int) -> int:
        """Write the tokens out, if they fit, and return how many bytes they take."""
        if not _written_out(self.text):
            return 0
        flow = _pixels(self.text) if self.text.pixels is not None else _tokens(self.text)
        size = len(flow.encode(errors="backslashreplace")) + 2000
        if size > room:
            return 0
        self.written = flow
        return size

    def add(self, index: int, room: int) -> int:
        """Put the map of that number in, if there is one and it fits, and return how many bytes it takes."""
        if index >= len(self.wanted):
            return 0
        map_ = self.wanted[index]
        size = int(causal(self.text).sum()) * 4 // 3 + (22 + 11 * STRONGEST) * len(self.text.queries) + 300
        if not self.written or size > room:
            self.left_out.append(map_)
            return 0
        self.maps.append(_packed(map_, self.text))
        return size

    def data(self) -> dict[str, Any] | None:
        """What the script needs to know; None for a text that is only in the picture."""
        if not self.maps:
            return None
        text, edges = self.text, None if self.text.edges is None else self.text.edges.tolist()
        about = {"length": len(text), "queries": text.queries.tolist(), "edges": edges, "maps": self.maps}
        return {**about, "opens": telling(self.wanted[0], text)}

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
        names = ", ".join(title(map_) for map_ in self.left_out[:NAMED])
        more = f" and {len(self.left_out) - NAMED} more" if len(self.left_out) > NAMED else ""
        why = f"A text of {len(self.text)} tokens is too long to be written out here; its maps"
        why = "Left out here for the size of the page" if self.written else why
        return Markup('<p class="absent">{}: {}{}. The .json file has them.</p>').format(why, names, more)


def _packed(map_: AttentionMap, text: AttendedText) -> dict[str, Any]:
    """One map for display: every row in 8 bits of its own scale, only the keys that do not come after the query; and
    of every row its strongest keys (−1 for the state, −2 where there are fewer) with their weights as they are.

    A shown weight is off by at most 1/254 of the largest in its row; the result's other files hold the weights.
    """
    seen = causal(text)
    values = np.where(seen, map_.values, 0).astype(np.float64)
    scale = np.abs(values).max(axis=1, keepdims=True, initial=0.0)
    whole = np.rint(np.divide(values * 127, scale, out=np.zeros_like(values), where=scale > 0)).astype(np.int8)
    end, largest = limit(map_, text)
    keys = np.full((len(values), STRONGEST), -2, dtype="<i4")
    weights = np.zeros(keys.shape, dtype="<f4")
    for row in range(len(values)):
        found = strongest(map_, row, text, STRONGEST)
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
    """The text in its flow, every token a span with its position."""
    asked = _asked(text)
    pieces = [_state(text)]
    for at, (gap, token) in enumerate(written(text.tokens, text.words)):
        pieces.append(Markup("{}<span {}>{}</span><wbr>").format(" " if gap else "", _names(text, at, asked), token))
    return Markup('<p class="{}">{}</p>').format(_flow(text), Markup("").join(pieces))


def _pixels(text: AttendedText) -> Markup:
    """The image, and beside it its tokens in their places, those that are no pixels after them."""
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
    """The class of what holds the tokens: "few" where only some have a row, which are then underlined."""
    return "tokens" if len(_asked(text)) == len(text) else "tokens few"


def _asked(text: AttendedText) -> set[int]:
    """The tokens that have a row: the queries, or all of a cell."""
    return set(range(len(text))) if text.edges is not None else set(text.queries.tolist())


def _names(text: AttendedText, at: int, asked: set[int]) -> Markup:
    names = ["asked"] * (at in asked) + ["special"] * (text.words[at] is None)
    names += ["marked"] * (text.span is not None and text.span[0] <= at < text.span[1])
    focus = Markup(' tabindex="-1"') if at in asked else ""
    return Markup('data-i="{}" class="{}"{}').format(at, " ".join(names), focus)
