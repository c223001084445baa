"""TextAttack's view of the goal: a prompt under which the model gets nothing right.

Importing this module imports TextAttack.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np

from ssmscope.attacks.offline import textattack

textattack()

from textattack.goal_function_results import ClassificationGoalFunctionResult  # noqa: E402
from textattack.goal_functions import GoalFunction  # noqa: E402
from textattack.shared import AttackedText  # noqa: E402


class PromptAccuracy(GoalFunction):
    """A prompt's score is how much accuracy it costs, clean − attacked; the goal is reached at accuracy 0.

    PromptBench scores the prompt that a search starts from as −1 − accuracy, so that it always takes a change of the
    first word, whether it costs accuracy or not. Here it scores 0, and a change is taken if it costs some, unless
    `as_promptbench` asks for the other.

    Args:
        accuracy: the accuracies under several prompts, which are judged together.
        as_promptbench: score the first prompt as PromptBench does.
    """

    def __init__(self, accuracy: Callable[[Sequence[str]], np.ndarray], *, as_promptbench: bool = False):
        with warnings.catch_warnings():  # it warns, in a deprecated way, of goals and models that it does not know
            warnings.simplefilter("ignore", DeprecationWarning)
            super().__init__(SimpleNamespace(model=accuracy), use_cache=False)
        self.accuracy = accuracy
        self.clean: float | None = None
        self.tried: set[str] = set()
        self._starts_low = as_promptbench

    def _call_model(self, attacked_text_list: Sequence[AttackedText]) -> list[float]:
        prompts = [attacked.text for attacked in attacked_text_list]
        self.tried.update(prompts)
        found = [float(value) for value in self.accuracy(prompts)] if prompts else []
        if self.clean is None:  # the first prompt that an attack asks for is the one that it starts from
            self.clean = found[0]
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
