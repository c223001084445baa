"""Runs of TextAttack's searches on single texts, and the outcomes of all attacks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float

from ssmscope.attacks.words.hotflip import Limits
from ssmscope.attacks.words.result import FAILED, SKIPPED, SUCCESS, AttackedText, Outcome, changed_words
from ssmscope.core.model import Model

CHARACTERS_PER_TOKEN = 4.5
MIN_FORKING_PRODUCTS = 2**22
"""Products per text from which on it pays to run common beginnings once (measured: at 2²⁰ it takes a fifth longer, at
2²³ a fifth less)."""

Scores = Callable[[Sequence[str]], Float[np.ndarray, "texts classes"]]


def described(limits: Limits, whose: str) -> tuple[str, ...]:
    """Describe the parts of HotFlip that run."""
    return (
        f"the {limits.candidates} best flips by the gradient",
        "words of one token for others",
        *([f"no stop word ({whose})"] if whose else []),
        "greedy" if limits.beam == 1 else f"a beam of {limits.beam}",
        *([f"at most {limits.flips} word{'s' if limits.flips > 1 else ''}"] if limits.flips is not None else []),
    )


def probabilities(scores: Float[np.ndarray, "texts classes"]) -> Float[np.ndarray, "texts classes"]:
    """Compute the softmax of class scores in float32 as TextAttack does, so that ties are the same."""
    return torch.from_numpy(scores).float().softmax(-1).numpy()


def sampled_rows(number: int, limit: int | None, seed: int) -> list[int]:
    """Return the rows that `TextData.sample` takes, so that an example has the same seed under any limit."""
    if limit is None or limit >= number:
        return list(range(number))
    return sorted(random.Random(seed).sample(range(number), limit))


def example_of(
    row: int, label: int, text: str, clean: Float[np.ndarray, " classes"], outcome: Outcome | None
) -> AttackedText:
    """Combine an example with its outcome; None if it was not attacked."""
    attacked = outcome or Outcome(text, clean, queries=1)
    answer = int(attacked.probabilities.argmax())
    words, changed = changed_words(text, attacked.text)
    return AttackedText(
        row=row,
        status=SKIPPED if outcome is None else FAILED if answer == label else SUCCESS,
        label=label,
        clean=int(clean.argmax()),
        answer=answer,
        before=float(clean[label]),
        after=float(attacked.probabilities[label]),
        queries=attacked.queries,
        gradients=attacked.gradients,
        words=words,
        changed=changed,
        text=text,
        attacked=attacked.text,
    )


def forks(model: Model, texts: Sequence[str]) -> bool:
    """Return True if running a text's beginning again costs more than continuing from its states."""
    weights = sum(weight.numel() for mixer in model.mixers for weight in mixer.parameters())
    characters = sum(map(len, texts)) / len(texts)
    return weights * characters / CHARACTERS_PER_TOKEN > MIN_FORKING_PRODUCTS
