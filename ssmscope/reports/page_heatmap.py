"""What the page's interactive heatmaps are made of: scores of tokens, packed, and where their attention lies."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ssmscope.reports.grouping import Found
from ssmscope.results import Result
from ssmscope.show.blocks import ScoredText, TokenScores
from ssmscope.show.tokens import bounds, shorten, visible, written

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


def packed(every: Sequence[tuple[Found, TokenScores]], links: Links) -> list[dict[str, Any]]:
    """For each view of scored texts its model, variant and texts, as JSON takes them. See `_text` for a text."""
    left = BUDGET
    results = []
    for found, scores in every:
        texts = []
        for text in scores.texts:
            size = _size(text)
            if size > left:
                break
            left -= size
            texts.append(_text(text, links.get((model_of(found.result), text.tokens), ()), scores.ends))
        results.append(
            {
                "model": ", ".join(found.entry.models),
                "variant": _variant(found, scores.score),
                "score": scores.score,
                "scoreName": scores.name,
                "layers": list(scores.layers),
                "texts": texts,
                "every": len(scores.texts),
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


def _size(text: ScoredText) -> int:
    shown = min(len(text), TEXT_TOKENS)
    return shown * (16 + 6 * (len(text.scores) + 1)) + 300


def _text(text: ScoredText, links: Sequence[Attended], ends: tuple[float, float] | None = None) -> dict[str, Any]:
    """A text for the page: its first tokens as they are written, and their scores as little-endian float32.

    `scores` holds first the mean and then every layer, each of so many numbers as `tokens` has; `low` and `high` are
    the ends of each row's colours, by default its range over all ordinary tokens of the text, shown or not.
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
        "low": plain.min(1).tolist() if ends is None else [ends[0]] * len(rows),
        "high": plain.max(1).tolist() if ends is None else [ends[1]] * len(rows),
        "range": [bounds(row, special) for row in rows],
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
