"""Runs of the attacks on prompts, with their templates, words and recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Int

from ssmscope.attacks.parts import Recipe, recipe
from ssmscope.attacks.prompts.checks import SEMANTIC
from ssmscope.attacks.prompts.search import PROMPTBENCH, Judge, searched, tried_all, with_suffix
from ssmscope.data.prompts import TASK_PROMPTS, TaskPrompts
from ssmscope.data.text import TextData
from ssmscope.errors import InputError
from ssmscope.interp.labelled import class_ids, word_ids

if TYPE_CHECKING:
    from ssmscope.core.model import Model


def fixed(each: Recipe, template: str, suffix: str, as_promptbench: bool) -> list[str]:
    """Return the prompts that an attack tries in any case; none for an attack that searches."""
    if each.name == SEMANTIC:
        return list(each.suffixes)
    where = PROMPTBENCH if as_promptbench else suffix
    candidates = [with_suffix(template, text, where) for text in each.suffixes]
    # PromptBench breaks ties alphabetically, because TextAttack sorts candidates.
    return sorted(candidates) if as_promptbench else candidates


def attacked(
    each: Recipe,
    template: str,
    candidates: Sequence[str],
    judge: Judge,
    protected: Sequence[str],
    seed: int,
    as_promptbench: bool,
) -> tuple[str, int]:
    """Return the worst prompt that an attack finds for a template, and how many it tried."""
    if candidates:
        return tried_all(template, candidates, judge)
    return searched(each, template, judge, words=protected, seed=seed, as_promptbench=as_promptbench)


def recipe_of(name: str, candidates: Sequence[str], resources: Mapping[str, Any]) -> Recipe:
    """Return the attack of this name, with the rewritten prompts that semantic tries.

    Raises:
        InputError: a resource that it needs is missing or cannot be read.
    """
    if name == SEMANTIC:
        ran = (f"{len(candidates)} rewritten prompts, the same for every template, all tried",)
        return Recipe(name, None, (), None, ran, suffixes=tuple(candidates))
    return recipe(name, flavour="prompt", **resources)


def own_prompts(own: TaskPrompts | None, data: TextData, what: str) -> TaskPrompts:
    """Return a known data set's own prompts, because `what` was not given.

    Raises:
        InputError: the data have none.
    """
    if own is None:
        raise InputError(
            f"{data.name} has no task prompts of its own: give {what}, and for a language model both template and "
            f"words (data sets with their own are {', '.join(TASK_PROMPTS)})"
        )
    return own


def labels_and_words(
    model: Model, data: TextData, words: Sequence[str] | None, own: TaskPrompts | None
) -> tuple[Int[np.ndarray, " examples"], tuple[str, ...] | None]:
    """Return the examples' class ids in the model's numbering, and a language model's words for the classes.

    Raises:
        InputError: words for a classifier, no words for data without their own, or not one for each class.
    """
    model.check_classes(f"accuracy on {data.name}")
    if model.is_classifier:
        if words is not None:
            raise InputError(f"{model.name} is a classifier and answers with its classes; give no words")
        return class_ids(model, data), None
    chosen = tuple(words) if words is not None else own_prompts(own, data, "words").words
    return word_ids(data, chosen), chosen


def notes_on(
    clean: Bool[np.ndarray, "templates examples"],
    labels: Int[np.ndarray, " examples"],
    candidates: Sequence[str],
    words: Sequence[str] | None,
) -> list[str]:
    """Return notes on the clean accuracies and on the rewritten prompts."""
    notes = []
    nothing = [str(i) for i, right in enumerate(clean) if not right.any()]
    if nothing:
        notes.append(f"under template {', '.join(nothing)} no answer is right: there is no drop to measure")
    share = np.bincount(labels).max() / len(labels)
    poor = [str(i) for i, right in enumerate(clean) if 0 < right.mean() <= share]
    if poor:
        notes.append(
            f"under template {', '.join(poor)} the clean accuracy is no higher than always answering the most frequent "
            f"class, {share:.3f}: a drop from there means little"
        )
    if candidates and words is not None:
        without = sum(not all(word.lower() in prompt.lower() for word in words) for prompt in candidates)
        if without:
            notes.append(
                f"{without} of {len(candidates)} rewritten prompts do not name every answer ({', '.join(words)})"
            )
    return notes
