"""Search for the prompt of lowest accuracy: candidates of each attack, and the judge that measures them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import runpy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from ssmscope.attacks.names import PROMPTBENCH, SEMANTIC, Recipe
from ssmscope.attacks.offline import textattack
from ssmscope.attacks.recipes import recipe
from ssmscope.attacks.words.lockstep import drawing_from, seeded
from ssmscope.core.text_files import read_text
from ssmscope.data.prompts import CONTENT
from ssmscope.errors import InputError, did_you_mean
from ssmscope.evaluation import Evaluator, Template

MAX_CHARACTERS_PER_CALL = 100_000_000
"""Characters of the filled prompts that are asked for together."""
UNKNOWN = np.int8(-1)
"""Mark of an example that was not asked about, in place of right (1) or wrong (0)."""
MIN_EXAMPLES_PER_CALL = 8
"""Examples that are asked about together even if fewer may decide."""


class Judge:
    """Judge of which examples are right under a prompt; each example is run under a prompt once."""

    def __init__(self, evaluator: Evaluator, contents: Sequence[str], labels: np.ndarray):
        self.evaluator, self.contents, self.labels = evaluator, contents, labels
        self._known: dict[str, np.ndarray] = {}

    def right(self, prompts: Sequence[str]) -> Bool[np.ndarray, "prompts examples"]:
        """Judge all examples under several prompts, together as far as the filled texts fit into memory."""
        return self._asked(prompts, np.arange(len(self.labels)))

    def fewer(self, prompts: Sequence[str], than: int) -> Int[np.ndarray, " prompts"]:
        """Count the examples that are right under each prompt, until there are `than` of them. Examples that are right
        under most prompts come first, in batches of the smallest number that can settle a prompt."""
        known = np.array(list(self._known.values())).reshape(-1, len(self.labels))
        order = np.argsort(-(known == 1).sum(0) / np.maximum(1, (known != UNKNOWN).sum(0)), kind="stable")
        found = dict.fromkeys(prompts, 0)
        left, at = list(found), 0
        while left and at < len(order):
            stop = at + max(than - max(found[prompt] for prompt in left), MIN_EXAMPLES_PER_CALL)
            for prompt, number in zip(left, self._asked(left, order[at:stop]).sum(1).tolist()):
                found[prompt] += number
            left, at = [prompt for prompt in left if found[prompt] < than], stop
        return np.array([found[prompt] for prompt in prompts])

    def _asked(self, prompts: Sequence[str], rows: Int[np.ndarray, " chosen"]) -> Bool[np.ndarray, "prompts chosen"]:
        """Judge some examples under each prompt."""
        for prompt in prompts:
            self._known.setdefault(prompt, np.full(len(self.labels), UNKNOWN))
        new = [prompt for prompt in dict.fromkeys(prompts) if (self._known[prompt][rows] == UNKNOWN).any()]
        contents = [self.contents[row] for row in rows]
        together = max(1, MAX_CHARACTERS_PER_CALL // max(1, sum(map(len, contents))))
        for start in range(0, len(new), together):
            part = new[start : start + together]
            scores = self.evaluator.grid([Template(prompt) for prompt in part], contents)
            for prompt, right in zip(part, self.evaluator.answers(scores) == self.labels[rows]):
                self._known[prompt][rows] = right
        return np.array([self._known[prompt][rows] == 1 for prompt in prompts]).reshape(len(prompts), len(rows))


def recipe_of(name: str, candidates: Sequence[str], resources: Mapping[str, Any]) -> Recipe:
    """Return the attack of this name, with the rewritten prompts that semantic tries."""
    if name == SEMANTIC:
        ran = (f"{len(candidates)} rewritten prompts, the same for every template, all tried",)
        return Recipe(name, None, (), None, ran, suffixes=tuple(candidates))
    return recipe(name, flavour="prompt", **resources)


def fixed(each: Recipe, template: str, suffix: str, as_promptbench: bool) -> list[str]:
    """Return the prompts that an attack tries in any case; none for an attack that searches."""
    if each.name == SEMANTIC:
        return list(each.suffixes)
    where = PROMPTBENCH if as_promptbench else suffix
    candidates = [with_suffix(template, text, where) for text in each.suffixes]
    # PromptBench breaks ties alphabetically, because TextAttack sorts candidates.
    return sorted(candidates) if as_promptbench else candidates


def tried_all(template: str, candidates: Sequence[str], judge: Judge) -> tuple[str, int]:
    """Return the first candidate of lowest accuracy, and the number of candidates other than the template."""
    accuracy = judge.right(candidates).mean(1)
    return candidates[int(accuracy.argmin())], len(set(candidates) - {template})


def with_suffix(template: str, suffix: str, where: str) -> str:
    """Add the suffix at the template's end, before its content, or where PromptBench puts it. At the end no space
    follows it, because the answer begins with its own. Before the content there is white space on both sides.
    PromptBench's place is after the template's last word as TextAttack splits words, before the punctuation there, and
    the suffix keeps its own spaces; unlike in PromptBench, a placeholder counts as a word."""
    if where == "end":
        return f"{template} {suffix}".rstrip()
    if where == PROMPTBENCH:
        from ssmscope.attacks.swaps import word_spans

        ends = [stop for _, stop in word_spans(textattack().shared.AttackedText(template))]
        at = max([template.index(CONTENT) + len(CONTENT), *ends[-1:]])
        return f"{template[:at]} {suffix}{template[at:]}".rstrip()
    before, _, after = template.partition(CONTENT)
    gap = " " if before and not before[-1].isspace() else ""
    return f"{before}{gap}{suffix.strip()} {CONTENT}{after}"


def drawn_from(seed: int, template: str, attack: str) -> AbstractContextManager[None]:
    """Seed Python's and numpy's global generators, which TextAttack draws from, and restore them on exit."""
    digest = hashlib.sha256(f"{seed}\0{attack}\0{template}".encode()).digest()
    return drawing_from(seeded(int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:12], "big")))


def rewritten(source: str | Path, data_name: str) -> tuple[str, ...]:
    """Read the prompts of the attack semantic: promptbench's for a data set, with a question and an answer appended
    because they have no place for the text, or a text file's, one a line with \\n for a line break."""
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
    # The file is run alone, because importing the package needs every dependency of its models.
    path = Path(package.origin).parent / "prompts" / "semantic_atk_prompts.py"
    if not path.is_file():
        raise InputError("this version of promptbench has no semantic prompts; give a file")
    sets = runpy.run_path(str(path))["SEMANTIC_ADV_PROMPT_SET"]
    if data_name not in sets:
        raise InputError(f"promptbench has no semantic prompts for {data_name}; it has some for {', '.join(sets)}")
    return list(dict.fromkeys(prompt for prompts in sets[data_name].values() for prompt in prompts))
