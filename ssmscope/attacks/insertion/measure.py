"""Texts with an inserted phrase, and the numbers of an insertion sweep from the answers to them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from ssmscope.attacks.curves import Questions, unknown_tokens
from ssmscope.core.bootstrap import Estimate, estimate, lowest, ratio, resampled_sums
from ssmscope.core.limits import refuse_above
from ssmscope.errors import InputError
from ssmscope.render.tokens import shorten, visible

if TYPE_CHECKING:
    from ssmscope.core.model import Model


def inserted(text: str, phrase: str, words: int) -> str:
    """Insert the phrase after so many words of the text, with single spaces around it."""
    found = list(re.finditer(r"\S+", text))
    if not words:
        start = found[0].start() if found else 0
        return f"{text[:start]}{phrase} {text[start:]}"
    at = found[words - 1].end()
    return f"{text[:at]} {phrase}{text[at:]}"


def attacked_texts(
    asked: Questions, phrase: str, shares: Sequence[float], outside: tuple[bool, bool]
) -> Iterable[list[str]]:
    """Yield all texts with the phrase at each place, place by place."""
    contents = asked.contents
    whole = [asked.before + content + asked.after for content in contents]
    if outside[0]:
        yield [f"{phrase} {text}" for text in whole]
    for place in shares:
        moved = [inserted(c, phrase, math.floor(place * len(c.split()) + 0.5)) for c in contents]
        yield [asked.before + content + asked.after for content in moved]
    if outside[1]:
        yield [f"{text}{'' if text[-1:].isspace() else ' '}{phrase}" for text in whole]


def checked_phrases(insert: str | Sequence[str]) -> tuple[str, ...]:
    given = [insert] if isinstance(insert, str) else list(insert)
    wrong = [phrase for phrase in given if not isinstance(phrase, str) or not phrase.strip()]
    if wrong or not given:
        shown = repr(wrong[0]) if wrong else "nothing"
        raise InputError(f"{shown} was given to insert; give a phrase of at least one word")
    phrases = tuple(phrase.strip() for phrase in given)
    if len(set(phrases)) < len(phrases):
        twice = next(phrase for phrase in phrases if phrases.count(phrase) > 1)
        raise InputError(f"the phrase {twice!r} is given twice; give each once")
    return phrases


def checked_shares(places: int | Sequence[float]) -> tuple[float, ...]:
    allowed = "allowed are a number of places from 2 on, or shares from 0 to 1"
    if isinstance(places, int):
        if places < 2:
            raise InputError(f"places is {places!r}; {allowed}")
        refuse_above(10_000, places=places)
        return tuple(at / (places - 1) for at in range(places))
    given = tuple(places)
    wrong = [p for p in given if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1]
    if wrong or not given:
        raise InputError(f"places has {wrong[0]!r}; {allowed}" if wrong else f"places is empty; {allowed}")
    if len(set(given)) < len(given):
        raise InputError(f"places names {next(p for p in given if given.count(p) > 1):g} twice; give each place once")
    return tuple(sorted(map(float, given)))


@dataclass(frozen=True)
class Measured:
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
    """Compute all estimates of a phrase.

    Args:
        clean, right: True where the answer is right on clean texts and at each place.
        changed: True where the answer differs from the clean one.
        clean_odds, odds: log-odds of the true class; None for generated answers.
    """
    number, examples = right.shape
    columns = [clean[None], np.all(right, axis=0, keepdims=True), right, changed & clean]
    if odds is not None and clean_odds is not None:
        here = np.asarray(odds == odds.min(0))
        columns += [odds - clean_odds, here / here.sum(0)]
    sums = resampled_sums(np.concatenate(columns).T.astype(np.float64), seed=seed)
    rights, everywhere = sums[:, :1], sums[:, 1:2]
    each = [sums[:, 2 + i * number : 2 + (i + 1) * number] for i in range(len(columns) - 2)]
    drops, flipped = 1 - ratio(each[0], rights), ratio(each[1], rights)
    places = tuple(
        {
            "accuracy": estimate(each[0][:, i] / examples),
            "drop": estimate(drops[:, i]),
            "flipped": estimate(flipped[:, i]),
            "log_odds_change": estimate(each[2][:, i] / examples) if len(each) > 2 else None,
            "worst_here": estimate(each[3][:, i] / examples) if len(each) > 2 else None,
        }
        for i in range(number)
    )
    return Measured(
        clean=estimate(rights[:, 0] / examples),
        places=places,
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
