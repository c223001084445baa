"""Bridge to PromptBench's own attacks on a prompt (Zhu et al. 2023), which are given accuracies of batched answers."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
from collections.abc import Callable, Sequence
from typing import Any

from ssmscope.attacks.names import ATTACKS, PROMPTBENCH, PROMPTBENCH_PREFIX, Recipe
from ssmscope.attacks.offline import stopwords_given, textattack
from ssmscope.attacks.prompts.search import Judge, drawn_from
from ssmscope.data.hub import check_reach
from ssmscope.data.prompts import CONTENT
from ssmscope.errors import INSTALL_PROMPTBENCH, InputError

MASKED_LM = "bert-base-uncased"
"""Model on the hub that PromptBench's BERT-Attack asks for words."""
NEEDS_ENCODER = tuple(f"{PROMPTBENCH_PREFIX}{name}" for name in ("textbugger", "textfooler", "bertattack"))


def own_recipe(name: str, templates: Sequence[str]) -> Recipe:
    """Return the description of an attack of PromptBench. Raises InputError if it cannot run: the package or what the
    attack needs is neither here nor can be downloaded."""
    _made(name, CONTENT, lambda *_: 1.0, ())
    broken = [str(number) for number, template in enumerate(templates) if _breaks_content(name, template)]
    said = f"template {', '.join(broken)}: no word follows {CONTENT}, and it puts the suffix inside the braces"
    ran = f"{_bare(name)} of PromptBench {version()} on TextAttack {importlib.metadata.version('textattack')}"
    return Recipe(name, None, (), None, (ran,), (said,) if broken else ())


def version() -> str:
    """Return PromptBench's version."""
    return importlib.metadata.version(PROMPTBENCH)


def _breaks_content(name: str, template: str) -> bool:
    """Return True if the placeholder is the last word, after which PromptBench puts a suffix, inside the braces. It
    cannot fill such a prompt itself."""
    return bool(ATTACKS[_bare(name)].suffixes) and not any(
        letter.isalnum() for letter in template.partition(CONTENT)[2]
    )


def attacked(each: Recipe, template: str, judge: Judge, *, words: Sequence[str], seed: int) -> tuple[str, int] | None:
    """Return the prompt at which PromptBench's attack ends, and how many others than the template it measured; None if
    the attack would break the template.

    Label words and the placeholder are its unmodifiable words. It asks for one prompt's accuracy at a time.
    """
    if _breaks_content(each.name, template):
        return None
    tried: set[str] = set()

    def accuracy(prompt: str, *_: Any) -> float:
        asked = prompt.rstrip()  # The answer begins with its own space.
        tried.add(asked)
        return float(judge.right([asked]).mean())

    # To TextAttack an apostrophe is part of the word before it: PromptBench's own lists have both forms too.
    kept = [f"{part}{mark}" for word in words for part in word.split() for mark in ("", "'")]
    attack = _made(each.name, template, accuracy, kept)
    with contextlib.redirect_stdout(io.StringIO()), drawn_from(seed, template, _bare(each.name)):
        worst = attack.attack()["attacked prompt"]
    return worst.rstrip(), len(tried - {template.rstrip()})


def _made(name: str, template: str, accuracy: Callable[..., float], kept: Sequence[str]) -> Any:
    textattack()  # Without it PromptBench's import of TextAttack reads the network.
    with contextlib.redirect_stdout(io.StringIO()), stopwords_given():
        try:
            from promptbench.prompt_attack import Attack
        except ImportError as error:
            said = f"{name} needs the package promptbench, which cannot be imported"
            raise InputError(f"{said} ({error}): {INSTALL_PROMPTBENCH}") from error
        if name in NEEDS_ENCODER and importlib.util.find_spec("tensorflow_hub") is None:
            said = f"{name} compares sentences by the Universal Sentence Encoder: install tensorflow_hub,"
            raise InputError(f"{said} or try {_bare(name)} with encoder=…, which is ours")
        try:
            if _bare(name) == "bertattack":
                check_reach(MASKED_LM, "model")
            return Attack(None, _bare(name), None, template, accuracy, [*kept, CONTENT.strip("{}")], verbose=False)
        except (ImportError, LookupError, OSError) as error:
            said = " ".join(str(error).split())
            raise InputError(f"{name} cannot start here ({said:.150}); leave it out, or try {_bare(name)}") from error


def _bare(name: str) -> str:
    return name.removeprefix(PROMPTBENCH_PREFIX)
