"""TextAttack's goals on prompts and on texts, and its search for one text. Importing this module imports TextAttack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ssmscope.attacks.offline import textattack
from ssmscope.attacks.words.result import Outcome
from ssmscope.data.text import PAIR_SEPARATOR

if TYPE_CHECKING:
    from ssmscope.attacks.parts import Recipe
    from ssmscope.attacks.prompts.search import Judge
    from ssmscope.attacks.words.lockstep import Ask

textattack()

from textattack.constraints import Constraint  # noqa: E402
from textattack.goal_function_results import ClassificationGoalFunctionResult  # noqa: E402
from textattack.goal_functions import GoalFunction, UntargetedClassification  # noqa: E402
from textattack.shared import AttackedText  # noqa: E402

UNBOUNDED_CALLS = 2
"""Number of calls of a greedy search before the first word's candidates."""


class PromptAccuracy(GoalFunction):
    """Goal whose score is the lost accuracy, clean − attacked; it is reached at accuracy 0.

    PromptBench scores the initial prompt as −1 − accuracy, so it always changes the first word, whether that costs
    accuracy or not. Here the initial prompt scores 0 and only changes that cost accuracy are taken, unless
    `as_promptbench` is set.

    TextAttack's greedy search asks for the initial prompt, for those by which it ranks the words, and then for each
    word's candidates, of which it takes the best if it improves on the current prompt. So a candidate is not measured
    further once as many examples are right as under the best prompt so far.
    """

    def __init__(self, judge: Judge, *, as_promptbench: bool = False):
        # The parent's __init__ is skipped, because it warns of goals and models that it does not know.
        self.query_budget, self.use_cache, self.maximizable, self.allow_skip = float("inf"), False, False, True
        self.judge, self.examples = judge, len(judge.labels)
        self.clean: float | None = None
        self.tried: set[str] = set()
        self._starts_low = as_promptbench
        self._best = self.examples + 1
        self._asked = 0

    def _call_model(self, attacked_text_list: Sequence[AttackedText]) -> list[float]:
        prompts = [attacked.text for attacked in attacked_text_list]
        self.tried.update(prompts)
        self._asked += 1
        if not prompts:
            return []
        if self._asked > UNBOUNDED_CALLS:
            right = self.judge.fewer(prompts, self._best)
            self._best = min(self._best, int(right.min()))
        else:
            right = self.judge.right(prompts).sum(1)
        found = [float(number) / self.examples for number in right]
        if self.clean is None:  # An attack asks for its initial prompt first.
            self.clean = found[0]
            self._best = self._best if self._starts_low else int(right[0])
        return found

    def _is_goal_complete(self, model_output: float, attacked_text: AttackedText) -> bool:
        return model_output == 0

    def _get_score(self, model_output: float, attacked_text: AttackedText) -> float:
        assert self.clean is not None
        if self._starts_low:
            self._starts_low = False
            return -1 - model_output
        return self.clean - model_output

    def _goal_function_result_type(self) -> type:
        return ClassificationGoalFunctionResult

    def _process_model_outputs(self, inputs: Sequence, outputs: Sequence) -> Sequence:
        return outputs


class ChangedAnswer(UntargetedClassification):
    """Goal of any class but the true one; `ask` returns class probabilities, those of the clean text are known."""

    def __init__(self, ask: Ask[np.ndarray], text: str, clean: np.ndarray, budget: int | None = None):
        # The parent's __init__ is skipped, because it warns of models that it does not know.
        self.ask, self.text, self.clean = ask, text, clean
        self.query_budget = float("inf") if budget is None else budget
        self.use_cache, self.maximizable, self.allow_skip, self.target_max_score = False, False, True, None

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
    attack = recipe.attack(goal, *constraints, KeepsPair())
    result, spent = goal.init_attack_example(AttackedText(text), label)
    if not spent:
        result = attack.search_method(result)
    return Outcome(result.attacked_text.text, np.asarray(result.raw_output), goal.num_queries)
