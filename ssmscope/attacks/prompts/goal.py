"""Goal of attacks on prompts, the accuracy that is lost, and the search for it. Importing this module imports
TextAttack."""

from __future__ import annotations

from collections.abc import Sequence

from ssmscope.attacks.names import Recipe
from ssmscope.attacks.offline import textattack
from ssmscope.attacks.prompts.search import Judge, drawn_from
from ssmscope.attacks.recipes import attack_of, protect
from ssmscope.attacks.swaps import ASKED_LATER
from ssmscope.data.prompts import CONTENT

textattack()

from textattack.goal_function_results import ClassificationGoalFunctionResult  # noqa: E402
from textattack.goal_functions import GoalFunction  # noqa: E402
from textattack.shared import AttackedText  # noqa: E402

UNBOUNDED_CALLS = 2
"""Number of calls of a greedy search before the first word's candidates."""


class PromptAccuracy(GoalFunction):
    """Goal whose score is the lost accuracy, clean − attacked; it is reached at accuracy 0. PromptBench scores the
    initial prompt as −1 − accuracy, so it always changes the first word; here the initial prompt scores 0 and only
    changes that cost accuracy are taken, unless `as_promptbench` is set. TextAttack's greedy search asks for the
    initial prompt, for those by which it ranks the words, and then for each word's candidates, of which it takes the
    best if it improves on the current prompt. So a candidate is not measured further once as many examples are right as
    under the best prompt so far."""

    def __init__(self, judge: Judge, *, as_promptbench: bool = False):
        # The parent's __init__ is skipped, because it warns of goals and models that it does not know.
        self.query_budget, self.use_cache, self.maximizable, self.allow_skip = float("inf"), False, False, True
        self.judge, self.examples = judge, len(judge.labels)
        self.clean: float | None = None
        self.tried: set[str] = set()
        self._starts_low = as_promptbench
        self._scored = 0
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
        self._scored += 1
        return self.clean - model_output - ASKED_LATER * self._scored

    def _goal_function_result_type(self) -> type:
        return ClassificationGoalFunctionResult

    def _process_model_outputs(self, inputs: Sequence, outputs: Sequence) -> Sequence:
        return outputs


def searched(
    each: Recipe, template: str, judge: Judge, *, words: Sequence[str], seed: int, as_promptbench: bool = False
) -> tuple[str, int]:
    """Return the prompt at which the attack's search ends, and how many others than the template it tried."""
    goal = PromptAccuracy(judge, as_promptbench=as_promptbench)
    with drawn_from(seed, template, each.name):
        found = attack_of(each, goal, protect(words, CONTENT)).attack(AttackedText(template), 0)
    worst = found.perturbed_result.attacked_text
    return worst.text, len(goal.tried - {template})
