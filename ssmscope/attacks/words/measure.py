"""How attacks on single texts run, by TextAttack's searches or by HotFlip, and what became of each example."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from ssmscope.attacks.parts import Recipe, protect
from ssmscope.attacks.words.hotflip import Limits, hotflip
from ssmscope.attacks.words.lockstep import lockstep
from ssmscope.attacks.words.result import FAILED, SKIPPED, SUCCESS, WORD, AttackedText, changed_words

if TYPE_CHECKING:
    from ssmscope.core.model import Model

LETTERS = 4.5
"""So many characters a token has, about."""
FORKING = 2**22
"""From so many products a text on it pays to run common beginnings once (measured: at 2²⁰ it takes a fifth longer, at
2²³ a fifth less)."""

Scores = Callable[[Sequence[str]], Float[np.ndarray, "texts classes"]]


class Outcome(NamedTuple):
    """Where an attack on one text ended, and what it asked of the model."""

    text: str
    answer: int
    true: float
    """The probability of the true class."""
    queries: int
    gradients: int = 0


def searched(
    attack: Recipe,
    texts: Sequence[str],
    labels: Sequence[int],
    clean: Float[np.ndarray, "texts classes"],
    scores: Scores,
    ended: Callable[[int], None],
    answers: Sequence[str],
    budget: int | None,
    seeds: Sequence[int],
    active: int,
) -> list[Outcome]:
    """Where TextAttack's searches end, which run in lockstep."""
    from ssmscope.attacks.words.search import search

    limits = (protect(answers, None),) if answers or not all(map(str.isascii, texts)) else ()
    searches = [
        partial(search, recipe=attack, text=text, label=label, clean=row, budget=budget, constraints=limits)
        for text, label, row in zip(texts, labels, clean)
    ]
    found = lockstep(
        searches,
        lambda asked: list(probabilities(scores(asked))),
        seeds=seeds,
        active=active,
        ended=lambda _: ended(1),
    )
    return [
        Outcome(each.text, int(each.probabilities.argmax()), float(each.probabilities[label]), each.queries)
        for each, label in zip(found, labels)
    ]


def flipped(
    model: Model, texts: Sequence[str], labels: Sequence[int], scores: Scores, ended: Callable[[int], None], **how: Any
) -> list[Outcome]:
    """Where HotFlip's searches end."""
    found = hotflip(model, texts, labels, scores, ended=ended, **how)
    return [
        Outcome(
            text=each.text,
            answer=int(each.scores.argmax()),
            true=float(probabilities(each.scores[None])[0, label]),
            queries=each.queries,
            gradients=each.gradients,
        )
        for each, label in zip(found, labels)
    ]


def limits_of(own: dict[str, Any], budget: int | None, kept: frozenset[str], answers: Sequence[str]) -> Limits:
    """What HotFlip may flip: no word that is kept, and no label word, in or out."""
    absent = frozenset(part.lower() for word in answers for part in WORD.findall(word))
    return Limits(
        beam=own["beam"],
        flips=own["flips"],
        candidates=own["candidates"],
        budget=budget,
        kept=kept | absent,
        absent=absent,
    )


def described(limits: Limits, whose: str) -> tuple[str, ...]:
    """The parts of HotFlip as it runs, in words."""
    return (
        f"the {limits.candidates} best flips by the gradient",
        "words of one token for others",
        *([f"no stop word ({whose})"] if whose else []),
        "greedy" if limits.beam == 1 else f"a beam of {limits.beam}",
        *([f"at most {limits.flips} word{'s' if limits.flips > 1 else ''}"] if limits.flips is not None else []),
    )


def probabilities(scores: Float[np.ndarray, "texts classes"]) -> Float[np.ndarray, "texts classes"]:
    """The softmax of class scores in float32, as TextAttack computes it: texts that it takes for equal are equal."""
    return torch.from_numpy(scores).float().softmax(-1).numpy()


def sampled_rows(number: int, limit: int | None, seed: int) -> list[int]:
    """The rows that `TextData.sample` takes: an example keeps its number, and with it its attack, under any limit."""
    if limit is None or limit >= number:
        return list(range(number))
    return sorted(random.Random(seed).sample(range(number), limit))


def example_of(
    row: int, label: int, text: str, clean: Float[np.ndarray, " classes"], outcome: Outcome | None
) -> AttackedText:
    """One example and what became of it; without an outcome it was not attacked."""
    before, answer = float(clean[label]), int(clean.argmax())
    status = SKIPPED if outcome is None else FAILED if outcome.answer == label else SUCCESS
    outcome = outcome or Outcome(text, answer, before, 1)
    words, changed = changed_words(text, outcome.text)
    return AttackedText(
        row=row,
        status=status,
        label=label,
        clean=answer,
        answer=outcome.answer,
        before=before,
        after=outcome.true,
        queries=outcome.queries,
        gradients=outcome.gradients,
        words=words,
        changed=changed,
        text=text,
        attacked=outcome.text,
    )


def forks(model: Model, texts: Sequence[str]) -> bool:
    """Whether a text's beginning costs more to run again than to continue from."""
    weights = sum(weight.numel() for mixer in model.mixers for weight in mixer.parameters())
    letters = sum(map(len, texts)) / len(texts)
    return weights * letters / LETTERS > FORKING
