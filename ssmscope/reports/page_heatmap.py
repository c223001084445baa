"""What the page's texts to point at are made of: scores of tokens, packed, and where their attention lies."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ssmscope.api.results import Result
from ssmscope.render.blocks import TokenRows, TokenText
from ssmscope.render.token_rows import ends_of, kinds
from ssmscope.render.tokens import chance, shorten, visible, written
from ssmscope.reports.grouping import Found

TEXT_TOKENS = 1500
"""How many tokens of a text the page has; the files hold all."""
TOKEN = 120
"""As many characters of a token as are shown."""
NAME = 60
"""As many of a text as its name has."""
BUDGET = 40_000_000
"""How many bytes the heatmaps of an analysis have about at most; of the texts beyond, the page says how many."""


@dataclass(frozen=True)
class Attended:
    """Where in the page the attention of a text is."""

    anchor: str
    """The piece of the page with its maps."""
    text: int
    """Its number there, from 0."""
    label: str
    """What the analysis is called."""


Links = Mapping[tuple[str, tuple[str, ...]], Sequence[Attended]]
"""By a model's fingerprint and a text's tokens."""


def packed(every: Sequence[tuple[Found, TokenRows]], links: Links) -> list[dict[str, Any]]:
    """For each view of coloured texts its model, variant and texts, as JSON takes them. See `_text` for a text."""
    left = BUDGET
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
                "scales": [[*ends_of(block, signed), "around" if signed else "upward"] for signed in kinds(block)],
                "rows": [" · ".join(row.name.splitlines()) for row in shown[0].rows] if shown else [],
                "texts": texts,
                "every": len(shown),
            }
        )
    return results


def model_of(result: Result) -> str:
    """What tells a result's model from another: its fingerprint, or its name where it has none."""
    return str(result.provenance.get("fingerprint") or result.provenance.get("model", ""))


def _variant(found: Found, score: str) -> str:
    """The score, and the other options in which the group's entries differ."""
    rest = found.label.removeprefix(", ".join(found.entry.models)).strip(" ·").split(" · ")
    return " · ".join([score, *(part for part in rest if part and part != f"score {score}")])


def _size(text: TokenText) -> int:
    shown = min(len(text.tokens), TEXT_TOKENS)
    return shown * (16 + 6 * len(text.rows)) + 300


def _text(text: TokenText, links: Sequence[Attended]) -> dict[str, Any]:
    """A text for the page: its first tokens as they are written, and their scores as little-endian float32.

    `scores` holds row after row, each of so many numbers as `tokens` has. `low` and `high` are where the colours of
    each row end, `signed` whether they lie around zero, and of each row `out` has the tokens without colour, `kept`
    those that are underlined, and `against` the strongest against them.
    """
    shown, special = min(len(text.tokens), TEXT_TOKENS), text.special
    every = written(text.tokens, text.words)
    rows = np.stack([row.scores for row in text.rows]).astype("<f4")
    return {
        "name": name_of([one for one, word in zip(every, text.words) if word is not None] or every),
        "tokens": [shorten(token, TOKEN) for _, token in every[:shown]],
        "gaps": "".join("1" if gap else "0" for gap, _ in every[:shown]),
        "special": [at for at in range(shown) if special[at]],
        "kept": [[int(at) for at in row.marked if at < shown] for row in text.rows],
        "against": [[int(at) for at in row.against if at < shown] for row in text.rows],
        "out": [[] if row.outside is None else np.flatnonzero(row.outside[:shown]).tolist() for row in text.rows],
        "answer": shorten(visible(text.answer), TOKEN),
        "p": chance(text.probability),
        "about": visible(text.about),
        "length": len(text.tokens),
        "scores": base64.b64encode(rows[:, :shown].tobytes()).decode(),
        "low": [row.ends[0] for row in text.rows],
        "high": [row.ends[1] for row in text.rows],
        "signed": [row.signed for row in text.rows],
        "range": [" · ".join(filter(None, (row.extent, row.remark))) for row in text.rows],
        "attention": [vars(link) for link in links],
    }


def name_of(tokens: Sequence[tuple[bool, str]]) -> str:
    """A text's beginning."""
    name = ""
    for gap, token in tokens:
        name += (" " if gap else "") + token
        if len(name) > NAME:
            return name[: NAME - 1] + "…"
    return name
