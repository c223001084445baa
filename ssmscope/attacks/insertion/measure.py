"""Texts with an inserted phrase, and the numbers of an insertion sweep from the answers to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int
from ssmscope.attacks.curves import Questions, at_step, no_drop, shifts, unknown_tokens
from ssmscope.attacks.insertion.places import inserted
from ssmscope.attacks.insertion.result import FIRST, InsertionCurve, Place
from ssmscope.core.bootstrap import Estimate, estimate, lowest, ratio, resampled_sums, share
from ssmscope.core.model import Model
from ssmscope.core.ties import highest
from ssmscope.render.tokens import shorten, visible


def attacked_texts(asked: Questions, phrase: str, spots: Sequence[tuple[str, float | None]]) -> Iterable[str]:
    before, after = asked.before, asked.after
    for name, place in spots:
        for content in asked.contents:
            whole = before + content + after
            if place is not None:
                words = math.floor(place * len(content.split()) + 0.5)
                yield before + inserted(content, phrase, words) + after
            else:
                gap = "" if whole[-1:].isspace() else " "
                yield f"{phrase} {whole}" if name == FIRST else f"{whole}{gap}{phrase}"


def measure(
    phrase: str,
    spots: Sequence[tuple[str, float | None]],
    answers: Int[np.ndarray, "spots+1 examples"],
    labels: Int[np.ndarray, " examples"],
    odds: Float[np.ndarray, "spots+1 examples"] | None,
    seed: int,
) -> InsertionCurve:
    """Compute a phrase's estimates from class ids and log-odds (None for generated answers), the clean texts first."""
    further = [(answers[1:] == labels).all(0, keepdims=True)]
    if odds is not None:
        here = highest(-odds[1:].T).T
        further.append(here / here.sum(0))
    clean, parts, (everywhere, *least) = shifts(answers, labels, odds, seed, *further)
    parts |= {} if odds is None else {"worst_here": least[0] / len(labels)}
    shares = {"accuracy": len(labels), "flipped": clean[0, 0]}
    return InsertionCurve(
        phrase=phrase,
        places=tuple(Place(*spot, **at_step(parts, at, **shares)) for at, spot in enumerate(spots)),
        hardest_places=lowest(parts["accuracy"]),
        lowest_odds=lowest(-least[0]) if least else (),
        worst=share(int(everywhere[0, 0]), len(labels)),
        worst_drop=estimate(1 - ratio(everywhere, clean)[:, 0]),
    )


def mean(values: Float[np.ndarray, " examples"], seed: int) -> Estimate:
    return estimate(resampled_sums(values[:, None], seed=seed)[:, 0] / len(values))


def notes_on(model: Model, phrases: Sequence[str], answers: np.ndarray, clean: Estimate) -> Iterable[str]:
    yield from no_drop(clean)
    silent = float((answers == -1).mean())
    if silent:
        yield f"{100 * silent:.1f} % of the generated answers name no class and count as wrong"
    for phrase in phrases:
        number, unknown = unknown_tokens(model, phrase)
        if unknown:
            shown = shorten(visible(phrase), 40)
            yield f"the tokenizer does not know {unknown} of the {number} tokens of “{shown}”"
