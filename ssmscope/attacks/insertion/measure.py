"""Texts with an inserted phrase, and the numbers of an insertion sweep from the answers to them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from ssmscope.attacks.curves import Questions, unknown_tokens
from ssmscope.attacks.insertion.result import FIRST
from ssmscope.core.bootstrap import Estimate, estimate, lowest, ratio, resampled_sums
from ssmscope.core.model import Model
from ssmscope.render.tokens import shorten, visible


def inserted(text: str, phrase: str, words: int) -> str:
    """Insert the phrase after so many words of the text, with single spaces around it."""
    found = list(re.finditer(r"\S+", text))
    if not words:
        start = found[0].start() if found else 0
        return f"{text[:start]}{phrase} {text[start:]}"
    at = found[words - 1].end()
    return f"{text[:at]} {phrase}{text[at:]}"


def attacked_texts(asked: Questions, phrase: str, spots: Sequence[tuple[str, float | None]]) -> Iterable[str]:
    """Yield all texts with the phrase at each spot, spot by spot."""
    before, after = asked.before, asked.after
    for name, share in spots:
        for content in asked.contents:
            whole = before + content + after
            if share is not None:
                words = math.floor(share * len(content.split()) + 0.5)
                yield before + inserted(content, phrase, words) + after
            else:
                gap = "" if whole[-1:].isspace() else " "
                yield f"{phrase} {whole}" if name == FIRST else f"{whole}{gap}{phrase}"


class Measured(NamedTuple):
    """Estimates of one phrase: of every place, by the fields of `Place`, and of the worst place of each example."""

    clean: Estimate
    places: tuple[dict[str, Any], ...]
    hardest: tuple[int, ...]
    lowest_odds: tuple[int, ...]
    worst: Estimate
    worst_drop: Estimate


def measure(
    clean: Bool[np.ndarray, " examples"],
    right: Bool[np.ndarray, "places examples"],
    changed: Bool[np.ndarray, "places examples"],
    clean_odds: Float[np.ndarray, " examples"] | None,
    odds: Float[np.ndarray, "places examples"] | None,
    seed: int,
) -> Measured:
    """Compute all estimates of a phrase from what is right and what differs from the clean answer at each place.

    `clean_odds` and `odds` are log-odds of the true class; None for generated answers.
    """
    number, examples = right.shape
    columns = [clean[None], np.all(right, axis=0, keepdims=True), right, changed & clean]
    if odds is not None and clean_odds is not None:
        here = np.asarray(odds == odds.min(0))
        columns += [odds - clean_odds, here / here.sum(0)]
    sums = resampled_sums(np.concatenate(columns).T.astype(np.float64), seed=seed)
    rights, everywhere = sums[:, :1], sums[:, 1:2]
    each = [sums[:, 2 + i * number : 2 + (i + 1) * number] for i in range(len(columns) - 2)]
    parts = {"accuracy": each[0] / examples, "drop": 1 - ratio(each[0], rights), "flipped": ratio(each[1], rights)}
    parts |= dict(zip(("log_odds_change", "worst_here"), (part / examples for part in each[2:])))
    places = [{name: estimate(part[:, i]) for name, part in parts.items()} for i in range(number)]
    return Measured(
        clean=estimate(rights[:, 0] / examples),
        places=tuple(places),
        hardest=lowest(each[0]),
        lowest_odds=lowest(-each[3]) if len(each) > 2 else (),
        worst=estimate(everywhere[:, 0] / examples),
        worst_drop=estimate((1 - ratio(everywhere, rights))[:, 0]),
    )


def mean(values: Float[np.ndarray, " examples"], seed: int) -> Estimate:
    return estimate(resampled_sums(values[:, None], seed=seed)[:, 0] / len(values))


def notes_on(model: Model, phrases: Sequence[str], answers: np.ndarray, clean: Estimate) -> Iterable[str]:
    if clean.value == 0:
        yield "the clean accuracy is 0: there is no drop to measure"
    silent = float((answers == -1).mean())
    if silent:
        yield f"{100 * silent:.1f} % of the generated answers name no class and count as wrong"
    for phrase in phrases:
        number, unknown = unknown_tokens(model, phrase)
        if unknown:
            shown = shorten(visible(phrase), 40)
            yield f"the tokenizer does not know {unknown} of the {number} tokens of “{shown}”"
