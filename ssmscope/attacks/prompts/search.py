"""The search for the prompt that costs a model most: which prompts an attack tries, and how each is judged."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Int

from ssmscope.attacks.parts import Recipe, protect, textattack
from ssmscope.core.reading import read_text
from ssmscope.data.prompts import CONTENT
from ssmscope.errors import InputError, did_you_mean
from ssmscope.evaluation import Evaluator, Template

if TYPE_CHECKING:
    from textattack.shared import AttackedText

CHARACTERS = 100_000_000
"""Of the examples' texts under all prompts that are asked together."""

UNKNOWN = np.int8(-1)
"""In place of right (1) or wrong (0), of an example that was not asked about."""

PROMPTBENCH = "promptbench"
"""The name of the sets of rewritten prompts that come with the package promptbench."""


TOGETHER = 8
"""How many examples are asked about together, at least, where each may be the last that is needed."""


class Judge:
    """Which examples a model gets right under a prompt; an example is run under a prompt once.

    Args:
        evaluator: of the model.
        contents: the examples' texts.
        labels: (examples,) their classes.
    """

    def __init__(self, evaluator: Evaluator, contents: Sequence[str], labels: np.ndarray):
        self.evaluator, self.contents, self.labels = evaluator, contents, labels
        self._known: dict[str, np.ndarray] = {}

    def right(self, prompts: Sequence[str]) -> Bool[np.ndarray, "prompts examples"]:
        """All prompts that were not asked before are asked together, as far as the filled texts fit into memory."""
        return self._asked(prompts, np.arange(len(self.labels)))

    def fewer(self, prompts: Sequence[str], than: int) -> Int[np.ndarray, " prompts"]:
        """How many examples are right under each prompt, where they are fewer than so many; else so many or more.

        Once so many are right under a prompt, no other example is asked about under it. The examples that are right
        under most prompts come first, and as many at once as it takes at least until a prompt is done with.
        """
        known = np.array(list(self._known.values())).reshape(-1, len(self.labels))
        order = np.argsort(-(known == 1).sum(0) / np.maximum(1, (known != UNKNOWN).sum(0)), kind="stable")
        found = dict.fromkeys(prompts, 0)
        left, at = list(found), 0
        while left and at < len(order):
            stop = at + max(than - max(found[prompt] for prompt in left), TOGETHER)
            for prompt, number in zip(left, self._asked(left, order[at:stop]).sum(1).tolist()):
                found[prompt] += number
            left, at = [prompt for prompt in left if found[prompt] < than], stop
        return np.array([found[prompt] for prompt in prompts])

    def _asked(self, prompts: Sequence[str], rows: Int[np.ndarray, " chosen"]) -> Bool[np.ndarray, "prompts chosen"]:
        """Which of some examples are right under each prompt."""
        for prompt in prompts:
            self._known.setdefault(prompt, np.full(len(self.labels), UNKNOWN))
        new = [prompt for prompt in dict.fromkeys(prompts) if (self._known[prompt][rows] == UNKNOWN).any()]
        contents = [self.contents[row] for row in rows]
        together = max(1, CHARACTERS // max(1, sum(map(len, contents))))
        for start in range(0, len(new), together):
            part = new[start : start + together]
            scores = self.evaluator.grid([Template(prompt) for prompt in part], contents)
            for prompt, right in zip(part, self.evaluator.answers(scores) == self.labels[rows]):
                self._known[prompt][rows] = right
        return np.array([self._known[prompt][rows] == 1 for prompt in prompts]).reshape(len(prompts), len(rows))


def tried_all(template: str, candidates: Sequence[str], judge: Judge) -> tuple[str, int]:
    """The candidate of least accuracy, the first of several, and how many there are other than the template."""
    accuracy = judge.right(candidates).mean(1)
    return candidates[int(accuracy.argmin())], len(set(candidates) - {template})


def with_suffix(template: str, suffix: str, where: str) -> str:
    """The suffix behind the whole template, before its content, or where PromptBench puts it.

    At the end there is a space before the suffix, and none behind it: what is asked for follows with its own. Before
    the content there is white space on both sides. PromptBench's place is behind the template's last word as TextAttack
    parts words, before the punctuation there, and the suffix keeps its own spaces; a placeholder is not broken up, as
    it is by PromptBench, but counts for a word.
    """
    if where == "end":
        return f"{template} {suffix}".rstrip()
    if where == PROMPTBENCH:
        at = _end_of_the_last_word(template)
        return f"{template[:at]} {suffix}{template[at:]}".rstrip()
    before, _, after = template.partition(CONTENT)
    gap = " " if before and not before[-1].isspace() else ""
    return f"{before}{gap}{suffix.strip()} {CONTENT}{after}"


def _end_of_the_last_word(template: str) -> int:
    attacked = textattack().shared.AttackedText(template)
    from ssmscope.attacks.swaps import word_spans  # imports TextAttack

    behind = template.index(CONTENT) + len(CONTENT)
    spans = word_spans(attacked)
    return max(spans[-1][1], behind) if spans else behind


def searched(
    recipe: Recipe, template: str, judge: Judge, *, words: Sequence[str], seed: int, as_promptbench: bool = False
) -> tuple[str, int]:
    """The prompt that the recipe's search ends at, and how many other prompts than the template it tried.

    The placeholder and `words` stay as they are. What the search draws depends on seed, template and attack alone.
    """
    from textattack.shared import AttackedText

    from ssmscope.attacks.prompts.goal import PromptAccuracy

    goal = PromptAccuracy(judge, as_promptbench=as_promptbench)
    with drawn_from(seed, template, recipe.name):
        found = recipe.attack(goal, protect(words, CONTENT)).attack(AttackedText(template), 0)
    worst: AttackedText = found.perturbed_result.attacked_text
    return worst.text, len(goal.tried - {template})


@contextmanager
def drawn_from(seed: int, template: str, attack: str) -> Iterator[None]:
    """Within the context Python's and numpy's global generators, which TextAttack draws from, start from these three;
    afterwards they are as before."""
    digest = hashlib.sha256(f"{seed}\0{attack}\0{template}".encode()).digest()
    states: tuple[Any, Any] = random.getstate(), np.random.get_state()
    random.seed(int.from_bytes(digest[:8], "big"))
    np.random.seed(int.from_bytes(digest[8:12], "big"))
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def rewritten(source: str | Path, data_name: str) -> tuple[str, ...]:
    """The prompts of the attack semantic: those of promptbench for a data set, or a text file's, one a line.

    In a file \\n stands for a line break. Prompts of promptbench lack the place for the text, and get a question and an
    answer behind them.

    Raises:
        InputError: promptbench is not installed or has none for this data set; no such file, or no prompt in it.
    """
    if str(source) == PROMPTBENCH:
        return tuple(f"{prompt.rstrip()}\nQuestion: {CONTENT}\nAnswer:" for prompt in _of_promptbench(data_name))
    path = Path(source)
    if not os.path.isfile(path):
        raise InputError(
            f"semantic is {str(source)!r}; allowed are {PROMPTBENCH!r} and a text file with one prompt a line"
            f"{did_you_mean(str(source), [PROMPTBENCH])}"
        )
    lines = read_text(path, str(path), advice="save it as UTF-8 text with one prompt a line").split("\n")
    prompts = tuple(dict.fromkeys(line.strip("\r").replace("\\n", "\n") for line in lines if line.strip()))
    if not prompts:
        raise InputError(f"{path} holds no prompt; give one a line, each with {CONTENT}")
    return prompts


def _of_promptbench(data_name: str) -> list[str]:
    package = importlib.util.find_spec(PROMPTBENCH)
    if package is None or package.origin is None:
        raise InputError("semantic prompts of promptbench need that package, which is not installed; give a file")
    # the file alone: the package's own import brings every dependency of its models
    path = Path(package.origin).parent / "prompts" / "semantic_atk_prompts.py"
    spec = importlib.util.spec_from_file_location("promptbench_semantic", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InputError("this version of promptbench has no semantic prompts; give a file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sets = module.SEMANTIC_ADV_PROMPT_SET
    if data_name not in sets:
        raise InputError(f"promptbench has no semantic prompts for {data_name}; it has some for {', '.join(sets)}")
    return list(dict.fromkeys(prompt for prompts in sets[data_name].values() for prompt in prompts))
