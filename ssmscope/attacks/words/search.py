"""TextAttack's search for one example, asking for scores as `lockstep` answers them.

Importing this module imports TextAttack.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
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
from textattack.constraints import Constraint  # noqa: E402
from textattack.goal_function_results import GoalFunctionResultStatus as Status  # noqa: E402
from textattack.goal_functions import UntargetedClassification  # noqa: E402
from textattack.shared import AttackedText  # noqa: E402


class Goal(UntargetedClassification):
    """Goal of any class but the true one; a text's score is 1 − p(true), in float32 as in TextAttack.

    `ask` returns each text's class probabilities, `clean` are those of the clean text, which counts as a query.
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
    every = [*recipe.constraints, *constraints, KeepsPair()]
    attack = Attack(goal, every, recipe.transformation, copy(recipe.search))
    result = goal.result(AttackedText(text), clean)
    if not goal.spent:
        result = attack.search_method(result)
    return Outcome(result.attacked_text.text, result.raw_output, goal.num_queries)
