"""Goal of attacks on words, any class but the true one, and the search for it. Importing this module imports
TextAttack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ssmscope.attacks.names import Recipe
from ssmscope.attacks.offline import textattack
from ssmscope.attacks.recipes import attack_of
from ssmscope.attacks.swaps import ASKED_LATER
from ssmscope.attacks.words.lockstep import Ask
from ssmscope.attacks.words.result import Outcome
from ssmscope.core.ties import OUTPUT_ROUNDING
from ssmscope.data.text import PAIR_SEPARATOR

textattack()

from textattack.constraints import Constraint  # noqa: E402
from textattack.goal_functions import UntargetedClassification  # noqa: E402
from textattack.shared import AttackedText  # noqa: E402


class ChangedAnswer(UntargetedClassification):
    """Goal of any class but the true one; `ask` returns class probabilities, those of the clean text are known."""

    def __init__(self, ask: Ask[np.ndarray], text: str, clean: np.ndarray, budget: int | None = None):
        # The parent's __init__ is skipped, because it warns of models that it does not know.
        self.ask, self.text, self.clean = ask, text, clean
        self.query_budget = float("inf") if budget is None else budget
        self.use_cache, self.maximizable, self.allow_skip, self.target_max_score = False, False, True, None
        self._scored = 0

    def _get_score(self, model_output: torch.Tensor, attacked_text: AttackedText) -> float:
        # TextAttack compares scores one by one: those within rounding of each other are the same number.
        self._scored += 1
        lost = 1 - float(model_output[self.ground_truth_output])
        return OUTPUT_ROUNDING * round(lost / OUTPUT_ROUNDING) - ASKED_LATER * self._scored

    def _call_model(self, attacked_text_list: Sequence[AttackedText]) -> list[torch.Tensor]:
        texts = [attacked.text for attacked in attacked_text_list]
        # An empty text cannot be read by a model, so it has the scores of the clean text.
        asked = [text for text in texts if text.strip() and text != self.text]
        found = dict(zip(asked, self.ask(asked) if asked else ()))
        return [torch.from_numpy(found.get(text, self.clean)) for text in texts]


class KeepsPair(Constraint):
    """Constraint that keeps the separator between the two sentences of a pair."""

    def __init__(self) -> None:
        super().__init__(compare_against_original=True)

    def _check_constraint(self, transformed_text: AttackedText, reference_text: AttackedText) -> bool:
        return transformed_text.text.count(PAIR_SEPARATOR) == reference_text.text.count(PAIR_SEPARATOR)


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
    goal = ChangedAnswer(ask, text, clean, budget)
    attack = attack_of(recipe, goal, *constraints, KeepsPair())
    result, spent = goal.init_attack_example(AttackedText(text), label)
    if not spent:
        result = attack.search_method(result)
    return Outcome(result.attacked_text.text, np.asarray(result.raw_output), goal.num_queries)
