"""Data of the page's interactive heatmaps: packed token scores and links to attention maps."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ssmscope.api.results import Result
from ssmscope.render.blocks import TokenRows, TokenText
from ssmscope.render.numbers import format_probability
from ssmscope.render.token_rows import row_kinds, scale_ends
from ssmscope.render.tokens import shorten, spell_tokens, visible
from ssmscope.reports.grouping import LabelledResult

MAX_TOKENS_PER_TEXT = 1500
"""Number of a text's first tokens on the page; the files have all."""
MAX_TOKEN_CHARACTERS = 120
"""Maximum length of a token as shown."""
MAX_NAME_CHARACTERS = 60
"""Maximum length of a text's name."""
MAX_BYTES = 40_000_000
"""Approximate maximum size of an analysis's heatmaps; the page says how many texts are left out."""


class AttentionLink(NamedTuple):
    """Location of a text's attention maps: the anchor of their part in the page, the text's index there, a name."""

    anchor: str
    text: int
    label: str


Links = Mapping[tuple[str, tuple[str, ...]], Sequence[AttentionLink]]
"""Links by a model's fingerprint and a text's tokens."""


def packed(every: Sequence[tuple[LabelledResult, TokenRows]], links: Links) -> list[dict[str, Any]]:
    """Return the model, variant and texts of each view of coloured texts as JSON values (`_text` describes a text)."""
    left = MAX_BYTES
    results = []
    for found, block in every:
        texts, shown = [], [text for text in block.texts if text.pixels is None]
        for text in shown:
            size = _size(text)
            if size > left:
                break
            left -= size
            texts.append(_text(text, links.get((model_of(found.result), text.tokens), ())))
        results.append(
            {
                "model": ", ".join(found.entry.models),
                "variant": _variant(found, block.score),
                "scoreName": block.name,
                "of": block.of,
                "marked": block.marked,
                "scales": [
                    [*scale_ends(block, signed), "around" if signed else "upward"] for signed in row_kinds(block)
                ],
                "rows": [" · ".join(row.name.splitlines()) for row in shown[0].rows] if shown else [],
                "texts": texts,
                "every": len(shown),
            }
        )
    return results


def model_of(result: Result) -> str:
    """Return an identifier of a result's model: its fingerprint, or its name if it has none."""
    return str(result.provenance.get("fingerprint") or result.provenance.get("model", ""))


def _variant(found: LabelledResult, score: str) -> str:
    """Join the score and the other options in which the group's entries differ."""
    rest = found.label.removeprefix(", ".join(found.entry.models)).strip(" ·").split(" · ")
    return " · ".join([score, *(part for part in rest if part and part != f"score {score}")])


def _size(text: TokenText) -> int:
    shown = min(len(text.tokens), MAX_TOKENS_PER_TEXT)
    return shown * (16 + 6 * len(text.rows)) + 300


def _text(text: TokenText, links: Sequence[AttentionLink]) -> dict[str, Any]:
    """Pack a text for the page: its first tokens as written, and their scores as little-endian float32.

    `scores` holds the rows one after the other, each with one number per token. For each row, `low` and `high` are the
    ends of the colour scale, `signed` is True for a scale around zero, `out` lists the tokens without colour, `kept`
    the underlined tokens, and `against` the strongest tokens against them.
    """
    shown, special = min(len(text.tokens), MAX_TOKENS_PER_TEXT), text.special
    every = spell_tokens(text.tokens, text.words)
    rows = np.stack([row.scores for row in text.rows]).astype("<f4")
    return {
        "name": name_of([one for one, word in zip(every, text.words) if word is not None] or every),
        "tokens": [shorten(token, MAX_TOKEN_CHARACTERS) for _, token in every[:shown]],
        "gaps": "".join("1" if gap else "0" for gap, _ in every[:shown]),
        "special": [at for at in range(shown) if special[at]],
        "kept": [[int(at) for at in row.marked if at < shown] for row in text.rows],
        "against": [[int(at) for at in row.against if at < shown] for row in text.rows],
        "out": [[] if row.outside is None else np.flatnonzero(row.outside[:shown]).tolist() for row in text.rows],
        "answer": shorten(visible(text.answer), MAX_TOKEN_CHARACTERS),
        "p": format_probability(text.probability),
        "about": visible(text.about),
        "length": len(text.tokens),
        "scores": base64.b64encode(rows[:, :shown].tobytes()).decode(),
        "low": [row.ends[0] for row in text.rows],
        "high": [row.ends[1] for row in text.rows],
        "signed": [row.signed for row in text.rows],
        "range": [" · ".join(filter(None, (row.extent, row.remark))) for row in text.rows],
        "attention": [link._asdict() for link in links],
    }


def name_of(tokens: Sequence[tuple[bool, str]]) -> str:
    """Return the beginning of a text as its name."""
    name = ""
    for gap, token in tokens:
        name += (" " if gap else "") + token
        if len(name) > MAX_NAME_CHARACTERS:
            return name[: MAX_NAME_CHARACTERS - 1] + "…"
    return name
