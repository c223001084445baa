"""What the page's interactive heatmaps are made of: scores of tokens, packed, and where their attention lies."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.interp.views.tokens import bounds, shorten, visible, written
from ssmscope.reports.grouping import Found

if TYPE_CHECKING:
    from ssmscope.interp.selection import ScoredText, SelectionHeatmap

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

    key: str
    """Of the piece of the page with its maps."""
    text: int
    """Its number there, from 0."""
    label: str
    """What the analysis is called."""


Links = Mapping[tuple[str, tuple[str, ...]], Sequence[Attended]]
"""By a model's fingerprint and a text's tokens."""


def packed(every: Sequence[Found], links: Links) -> list[dict[str, Any]]:
    """For each heatmap of texts its model, variant and texts, as JSON takes them. See `_text` for a text."""
    left = BUDGET
    results = []
    for found in every:
        result: Any = found.result
        texts = []
        for text in result:
            size = _size(text)
            if size > left:
                break
            left -= size
            texts.append(_text(text, result, links))
        results.append(
            {
                "model": ", ".join(found.entry.models),
                "variant": _variant(found),
                "score": result.score,
                "scoreName": result.score_name,
                "layers": list(result.layers),
                "texts": texts,
                "every": len(result),
            }
        )
    return results


def model_of(result: Any) -> str:
    """What tells a result's model from another: its fingerprint, or its name where it has none."""
    return str(result.provenance.get("fingerprint") or result.provenance.get("model", ""))


def _variant(found: Found) -> str:
    """The score, and the other options in which the group's entries differ."""
    result: Any = found.result
    rest = found.label.removeprefix(", ".join(found.entry.models)).strip(" ·").split(" · ")
    return " · ".join([result.score, *(part for part in rest if part and part != f"score {result.score}")])


def _size(text: ScoredText) -> int:
    shown = min(len(text), TEXT_TOKENS)
    return shown * (16 + 6 * (len(text.scores) + 1)) + 300


def _text(text: ScoredText, result: SelectionHeatmap, links: Links) -> dict[str, Any]:
    """A text for the page: its first tokens as they are written, and their scores as little-endian float32.

    `scores` holds first the mean and then every layer, each of so many numbers as `tokens` has; `low` and `high` are
    the ends of each row's range over all ordinary tokens of the text, shown or not.
    """
    shown = min(len(text), TEXT_TOKENS)
    every = written(text.tokens, text.words)
    gaps = "".join("1" if gap else "0" for gap, _ in every[:shown])
    tokens = [shorten(token, TOKEN) for _, token in every[:shown]]
    rows = np.concatenate([text.mean[None], text.scores]).astype("<f4")
    special = text.special
    plain = rows[:, ~special] if not special.all() else np.zeros((len(rows), 1), np.float32)
    return {
        "name": name_of([one for one, word in zip(every, text.words) if word is not None] or every),
        "tokens": tokens,
        "gaps": gaps,
        "special": [at for at in range(shown) if special[at]],
        "kept": [int(at) for at in text.rationale if at < shown],
        "answer": shorten(visible(text.answer), TOKEN),
        "p": f"{text.probability:.3f}",
        "length": len(text),
        "scores": base64.b64encode(rows[:, :shown].tobytes()).decode(),
        "low": plain.min(1).tolist(),
        "high": plain.max(1).tolist(),
        "range": [bounds(row, special) for row in rows],
        "attention": [vars(link) for link in links.get((model_of(result), text.tokens), ())],
    }


def name_of(tokens: Sequence[tuple[bool, str]]) -> str:
    """A text's beginning."""
    name = ""
    for gap, token in tokens:
        name += (" " if gap else "") + token
        if len(name) > NAME:
            return name[: NAME - 1] + "…"
    return name
