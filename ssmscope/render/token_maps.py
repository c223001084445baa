"""Maps of weights between the tokens of texts as HTML: a text whose tokens show their weights, next to the map.

The page opens on a text's first map and last query, on its own scale. The script fetches nothing and starts every
fragment that it has not started before, so that a page can hold several blocks, or one twice. Without scripts there is
the picture.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from markupsafe import Markup
from ssmscope.render import html, token_rows
from ssmscope.render.blocks import TokenMaps, TokenRows, TokenText
from ssmscope.render.colours import SIGNED, SIGNED_ON_DARK, STEPS, signed_shades, template_text
from ssmscope.render.token_rows import cut_note
from ssmscope.render.tokens import spell_tokens, visible

MAX_PAGE_TOKENS = 1500
"""Largest number of tokens of a text that is written out with its maps; longer ones are in the picture only."""
MAX_PAGE_WEIGHTS = 8_000_000
"""Largest number of weights in a block, of some 4/3 bytes each; texts share them map by map."""


@dataclass(frozen=True, eq=False)
class TokenMap:
    """Weights (queries, keys) of queries on keys: tokens, or cells of neighbouring tokens.

    Attributes:
        state: (queries,), weight of everything before the first token; None without any.
        end, largest: end of the map's colours, and its largest |weight|.
        ends: (queries,), end of each row's colours on a scale of its own.
        strongest: per query its strongest keys with their weights; the key −1 is the state.
        signed: weights may be below 0.
    """

    name: str
    values: np.ndarray
    state: np.ndarray | None
    end: float
    largest: float
    ends: np.ndarray
    strongest: Sequence[Sequence[tuple[int, float]]]
    signed: bool = True


@dataclass(frozen=True)
class Words:
    """Words of a page for a row of a map, for rows and columns, and for that which a pointed token shows."""

    query: str
    rows: str
    columns: str
    shown: str


ATTENTION = Words("query", "queries", "keys", "attends to")


@dataclass(frozen=True, eq=False)
class MappedText:
    """Text with `maps` maps; `map(i)` returns number i.

    Attributes:
        queries: (queries,), position of each row of the maps.
        edges: first positions of the cells, and the length; None where keys are tokens.
        seen: (queries, keys) bool, the keys that each query can read.
        notes: what else is said of each query.
        answers: what stands below each token, an answer at its position; None without.
    """

    text: TokenText
    queries: np.ndarray
    edges: np.ndarray | None
    seen: np.ndarray
    maps: int
    map: Callable[[int], TokenMap]
    notes: Sequence[str] | None = None
    answers: Sequence[str] | None = None

    @property
    def fits(self) -> bool:
        """True if a page has room for the text token by token."""
        return self.maps > 0 and len(self.queries) > 0 and len(self.text.tokens) <= MAX_PAGE_TOKENS

    @cached_property
    def asked(self) -> set[int]:
        """Tokens that have a row: the queries, or all tokens where keys are cells."""
        return set(self.queries.tolist()) if self.edges is None else set(range(len(self.text.tokens)))

    @property
    def ahead(self) -> bool:
        """True if queries read keys after their own."""
        keys = np.arange(len(self.text.tokens)) if self.edges is None else self.edges[:-1]
        return bool((self.seen & (keys > self.queries[:, None])).any())


def token_maps(
    texts: Sequence[MappedText], rows: TokenRows, name: str, legend: str, words: Words = ATTENTION
) -> TokenMaps:
    """Return the block of texts with maps of weights called `name`, whose `legend` says how they are made: `rows` in a
    terminal, the maps on a page."""
    return TokenMaps(
        lambda colours: token_rows.terminal(rows, colours),
        lambda: fragment(texts, legend, words),
        token_rows.style() + template_text("token_maps.css"),
        f'(() => {{\n"use strict";\n{template_text("token_maps.js")}startTokenMaps(document);\n}})();\n',
        tokens=[each.text.tokens for each in texts],
        name=name,
    )


def fragment(texts: Sequence[MappedText], legend: str, words: Words = ATTENTION) -> str:
    """Return the HTML of texts with as many of their maps as fit, as data."""
    data = [_data(text, count) if count else None for text, count in zip(texts, _maps_that_fit(texts))]
    colours = {"light": signed_shades(SIGNED), "dark": signed_shades(SIGNED_ON_DARK)}
    packed = json.dumps({"steps": STEPS, "query": words.query, **colours, "texts": data})
    sections = [_section(at, text, own) for at, (text, own) in enumerate(zip(texts, data))]
    # A "<" in the data could close the element that holds it.
    island = Markup(packed.replace("<", "\\u003c"))
    return html.template("token_maps.html").render(legend=legend, words=words, texts=sections, data=island)


def _maps_that_fit(texts: Sequence[MappedText]) -> list[int]:
    """Return the number of maps shown of each text: in turns, so that every text has a map before one has two."""
    counts, room = [0] * len(texts), MAX_PAGE_WEIGHTS
    for turn in range(max((text.maps for text in texts), default=0)):
        for at, text in enumerate(texts):
            size = int(text.seen.sum())
            if text.fits and turn == counts[at] < text.maps and size <= room:
                counts[at], room = turn + 1, room - size
    return counts


def _section(at: int, text: MappedText, data: dict[str, Any] | None) -> dict[str, Any]:
    given, maps = text.text, data["maps"] if data else []
    found: dict[str, Any] = {
        "answer": token_rows.answer(at, given.answer, given.probability, given.about),
        "maps": [each["name"] for each in maps],
        "sunk": any(each["sink"] for each in maps),
        "flow": "tokens" if len(text.asked) == len(given.tokens) else "tokens few",  # Few are underlined.
        "tokens": list(_tokens(text)) if maps else [],
        "image": None,
        "rest": cut_note(len(maps), text.maps, "maps"),
    }
    if len(given.tokens) > MAX_PAGE_TOKENS:
        many = f"A text of {len(given.tokens)} tokens"
        found["rest"] = f"{many} is too long to be shown token by token; the files hold its maps"
    if given.pixels is not None:
        tall, wide = given.pixels.shape[:2]
        side = max(4, min(16, 300 // max(tall, wide)))
        found |= {"image": _image(given.pixels), "tall": tall, "wide": wide, "side": side}
    return found


def _tokens(text: MappedText) -> Iterator[dict[str, Any]]:
    marked = range(*text.text.span) if text.text.span is not None else ()
    for at, (gap, token) in enumerate(spell_tokens(text.text.tokens, text.text.words)):
        asked, special = at in text.asked, text.text.words[at] is None
        names = ["asked"] * asked + ["special"] * special + ["marked"] * (at in marked)
        names += ["answered"] * (text.answers is not None)
        shown = visible(text.text.tokens[at]) if text.text.pixels is not None else token
        answer = None if text.answers is None else text.answers[at]
        found = {"at": at, "gap": gap, "text": shown, "asked": asked, "special": special, "answer": answer}
        yield found | {"names": " ".join(names)}


def _data(text: MappedText, count: int) -> dict[str, Any]:
    edges = None if text.edges is None else text.edges.tolist()
    maps = [_packed(text.map(number), text.seen) for number in range(count)]
    found = {"length": len(text.text.tokens), "queries": text.queries.tolist(), "edges": edges, "maps": maps}
    found |= {"ahead": True} if text.ahead else {}
    return found if text.notes is None else {**found, "notes": list(text.notes)}


def _packed(map_: TokenMap, seen: np.ndarray) -> dict[str, Any]:
    """Encode one map for display: every row in 8 bits on its own scale, off by at most 1/254 of its largest weight,
    without the keys that a query cannot read; and the strongest keys of every row (−1 for the state, −2 for none) with
    exact weights."""
    values = np.where(seen, map_.values, 0).astype(np.float64)
    scale = np.abs(values).max(axis=1, keepdims=True, initial=0.0)
    whole = np.rint(np.divide(values * 127, scale, out=np.zeros_like(values), where=scale > 0)).astype(np.int8)
    keys = np.full((len(values), max(map(len, map_.strongest), default=0)), -2, dtype="<i4")
    weights = np.zeros(keys.shape, dtype="<f4")
    for row, found in enumerate(map_.strongest):
        keys[row, : len(found)], weights[row, : len(found)] = zip(*found)
    return {
        "name": map_.name,
        "signed": map_.signed,
        "end": map_.end,
        "largest": map_.largest,
        "rows": _base64(whole[seen]),
        "scale": _base64(scale[:, 0].astype("<f4")),
        "ends": _base64(map_.ends.astype("<f4")),
        "sink": None if map_.state is None else _base64(map_.state.astype("<f4")),
        "keys": _base64(keys),
        "weights": _base64(weights),
    }


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _image(pixels: np.ndarray) -> str:
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    shown = pixels if pixels.shape[2] == 3 else pixels.mean(-1, keepdims=True).repeat(3, axis=-1)
    imsave(buffer, shown.clip(0, 1), format="png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
