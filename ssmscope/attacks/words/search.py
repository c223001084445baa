"""TextAttack's search for one example, asking for scores as `lockstep` answers them.

Importing this module imports TextAttack.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.attacks.offline import textattack
from ssmscope.attacks.words.result import Outcome
from ssmscope.data.text import PAIR_SEPARATOR

if TYPE_CHECKING:
    from ssmscope.attacks.parts import Recipe
    from ssmscope.attacks.words.lockstep import Ask

textattack()

from textattack import Attack  # noqa: E402
from textattack.constraints import Constraint, PreTransformationConstraint  # noqa: E402
from textattack.goal_function_results import GoalFunctionResultStatus as Status  # noqa: E402
from textattack.goal_functions import UntargetedClassification  # noqa: E402
from textattack.shared import AttackedText  # noqa: E402
from textattack.shared.utils import words_from_text  # noqa: E402
from textattack.transformations import Transformation  # noqa: E402

from ssmscope.attacks.swaps import word_spans  # noqa: E402

CHINESE = re.compile("[\u4e00-\u9fff]")


class Goal(UntargetedClassification):
    """Goal of any class but the true one; a text's score is 1 − p(true), in float32 as in TextAttack.

    Args:
        ask: returns each text's class probabilities (classes,) float32.
        label: the true class.
        clean: the probabilities of the clean text, which counts as a query.
        budget: maximum number of queries.
    """

    def __init__(self, ask: Ask[np.ndarray], label: int, clean: np.ndarray, budget: int | None = None):
        # The parent's __init__ is skipped, because it warns of models that it does not know.
        self.ask, self.ground_truth_output, self.clean = ask, label, clean
        self.query_budget = float("inf") if budget is None else budget
        self.num_queries = 1
        self.use_cache, self.maximizable, self.allow_skip, self.target_max_score = False, False, True, None

    def get_results(self, attacked_text_list: Sequence[AttackedText], check_skip: bool = False) -> tuple[list, bool]:
        """Return what TextAttack's method of this name returns, for all texts at once."""
        left = self.query_budget - self.num_queries
        texts = attacked_text_list[: int(left)] if left < len(attacked_text_list) else attacked_text_list
        self.num_queries += len(texts)
        # An empty text cannot be read by a model, so it has the scores of the clean text.
        asked = [text.text for text in texts if text.text.strip()]
        found = dict(zip(asked, self.ask(asked) if asked else ()))
        return [self.result(text, found.get(text.text, self.clean)) for text in texts], self.spent

    @property
    def spent(self) -> bool:
        return self.num_queries == self.query_budget

    def result(self, text: AttackedText, probabilities: np.ndarray) -> Any:
        """Return TextAttack's result of a text."""
        answer = int(probabilities.argmax())
        status = Status.SEARCHING if answer == self.ground_truth_output else Status.SUCCEEDED
        score = float(np.float32(1) - probabilities[self.ground_truth_output])
        own = text, probabilities, answer, status, score, self.num_queries, self.ground_truth_output
        return self._goal_function_result_type()(*own)


class KeepsPair(Constraint):
    """Constraint that keeps the separator between the two sentences of a pair."""

    def __init__(self) -> None:
        super().__init__(compare_against_original=True)

    def _check_constraint(self, transformed_text: AttackedText, reference_text: AttackedText) -> bool:
        return transformed_text.text.count(PAIR_SEPARATOR) == reference_text.text.count(PAIR_SEPARATOR)


class Once(PreTransformationConstraint):
    """Several constraints as one, which are evaluated once per text and transformation, not for each word."""

    def __init__(self, constraints: Sequence[PreTransformationConstraint]):
        self.constraints = constraints

    def __call__(self, current_text: AttackedText, transformation: Transformation) -> set[int]:
        known = vars(current_text).setdefault("allowed", {})
        if id(transformation) not in known:
            each = (constraint(current_text, transformation) for constraint in self.constraints)
            known[id(transformation)] = set.intersection(*each)
        return known[id(transformation)]

    def _get_modifiable_indices(self, current_text: AttackedText) -> set[int]:
        return set.intersection(*(each._get_modifiable_indices(current_text) for each in self.constraints))


@lru_cache(maxsize=2**16)
def number_of_words(text: str) -> int:
    return len(words_from_text(text))


class QuickText(AttackedText):
    """`AttackedText` that replaces words without splitting the unchanged ones again.

    A search makes a new text per candidate, and for each the parent class splits every word of the text again; that is
    most of a search's cost. The new texts are equal to the parent class's in all their attributes.
    """

    def __init__(self, text: str):
        self._joined = text
        self._places: list[tuple[int, int]] | None = None
        super().__init__(text)

    @property
    def text(self) -> str:
        return self._joined

    def generate_new_attacked_text(self, new_words: Sequence[str]) -> AttackedText:
        words, text, spans = self.words, self.text, self._spans()
        if spans is None:
            return super().generate_new_attacked_text(new_words)
        attributes = self.attack_attrs
        modified, newly = set(attributes["modified_indices"]), set[int]()
        places = attributes["original_index_map"]
        made, at, moved = "", 0, 0
        for index, (old, new) in enumerate(zip(words, new_words)):
            if old == new:
                continue
            start, stop = spans[index]
            made, at = made + text[at:start], stop
            count = 1 if new.isascii() and new.isalnum() else number_of_words(new)
            if count != 1:
                modified = {i if i < index else i + count - 1 for i in modified if i != index}
                places = places.copy()
                if count == 0:
                    places[places == index] = -1
                places[places > index] += count - 1
                if count > 1 and old != words_from_text(new)[0]:
                    places[places == index] += count - 1
            here = range(index + moved, index + moved + count)
            modified.update(here)
            newly.update(here)
            moved += count - 1
            if count == 0 and at < len(text):  # One of the two spaces around a deleted word is deleted too.
                if index == 0:
                    at += text[at] == " "
                else:
                    made = made.removesuffix(" ")
            made += new
        kept = {"label_names": attributes["label_names"]} if "label_names" in attributes else {}
        return self._with_text(
            made + text[at:],
            kept
            | {
                "newly_modified_indices": newly,
                "previous_attacked_text": self,
                "modified_indices": modified,
                "original_index_map": places,
            },
        )

    def _with_text(self, text: str, attributes: dict[str, Any]) -> QuickText:
        """Return another text, whose words are split on first use."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        for found in ("_words", "_words_per_input", "_pos_tags", "_ner_tags"):
            new.__dict__[found] = None
        new.__dict__.pop("allowed", None)
        new._text_input = OrderedDict(zip(self._text_input, [text]))
        new._joined, new._places = text, None
        new.attack_attrs = attributes
        return new

    def _spans(self) -> list[tuple[int, int]] | None:
        """Return the positions of the words; None for Chinese, where segmentation depends on context."""
        if self._places is None:
            self._places = [] if CHINESE.search(self.text) else word_spans(self)
        return self._places or None


def search(
    ask: Ask[np.ndarray],
    *,
    recipe: Recipe,
    text: str,
    label: int,
    clean: np.ndarray,
    budget: int | None = None,
    constraints: Sequence[Any] = (),
) -> Outcome:
    """Run TextAttack's attack on one correctly classified text with these class probabilities."""
    goal = Goal(ask, label, clean, budget)
    every = [*recipe.constraints, *constraints, *([KeepsPair()] if PAIR_SEPARATOR in text else [])]
    before = [each for each in every if isinstance(each, PreTransformationConstraint)]
    after = [each for each in every if not isinstance(each, PreTransformationConstraint)]
    attack = Attack(goal, [*([Once(before)] if before else []), *after], recipe.transformation, copy(recipe.search))
    result = goal.result(QuickText(text), clean)
    if not goal.spent:
        result = attack.search_method(result)
    return Outcome(result.attacked_text.text, result.raw_output, goal.num_queries)
