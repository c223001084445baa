"""Attacks on the prompt: how far a language model's accuracy falls when the words around the text are changed.

Baleen (000), section 4.3 and Table 4, after PromptBench (Zhu et al. 2023): the performance drop rate
PDR = 1 − accuracy(attacked prompt) / accuracy(clean prompt).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ssmscope.attacks.parts import RECIPES, Recipe, recipe
from ssmscope.attacks.position import class_ids
from ssmscope.attacks.prompt_result import Cost, PromptAttack, measured
from ssmscope.attacks.prompt_search import PROMPTBENCH, Judge, rewritten, searched, tried_all, with_suffix
from ssmscope.errors import InputError, did_you_mean
from ssmscope.evaluation import Evaluator, Template
from ssmscope.results import record_provenance
from ssmscope.tasks.prompts import TASK_PROMPTS, TaskPrompts, content_of
from ssmscope.tasks.text import SOURCES, TextData

if TYPE_CHECKING:
    from ssmscope.model import Model

SEMANTIC = "semantic"
ATTACKS = (*RECIPES["prompt"], SEMANTIC)
"""All attacks, by name."""

PAPER = ("stresstest", "checklist", "deepwordbug", "textbugger")
"""Those of Baleen's Table 4."""

PLACES = ("end", "before")
SPLIT = "<SPLIT>"  # TextAttack parts texts at it


def prompt_attack(
    model: Model,
    data: TextData,
    *,
    attacks: Sequence[str] = PAPER,
    templates: Sequence[str] | None = None,
    words: Sequence[str] | None = None,
    scoring: str = "likelihood",
    normalise: bool = False,
    suffix: str = "end",
    as_promptbench: bool = False,
    limit: int | None = None,
    embeddings: str | Path | None = None,
    masked_lm: str | Path | None = None,
    encoder: str | Path | None = None,
    semantic: str | Path | None = None,
    cache: str | Path | None = None,
    seed: int = 0,
) -> PromptAttack:
    """Attack task prompts and measure what it costs the model (Baleen, Table 4).

    An attack changes a template around its `{content}`, measures every candidate on all examples, and ends at the one
    of least accuracy that it found; the drop is PDR = 1 − accuracy / clean accuracy. The placeholder and the words for
    the classes stay as they are. stresstest and checklist append fixed suffixes and try them all; semantic tries
    rewritten prompts; the others change words and search, greedily, as PromptBench defines them.

    In two points PromptBench itself does otherwise, and its drops are not comparable with those of the default. Its
    searches score the prompt that they start from as −1 − accuracy and so always take a change of the first word, where
    here a change is taken only if it costs accuracy. And it places suffixes before the template's last punctuation,
    where here they stand at its very end, or before `{content}`. With `as_promptbench` both are done its way. (At a
    prompt's end no space follows a suffix in either: the answer follows with its own.)

    Every number has a 95 % bootstrap interval over examples; clean and attacked accuracy come from the same resamples,
    and so do averages over templates. The worst prompt is chosen on the same examples that it is measured on, which
    the intervals do not show. A template under which nothing is right has no drop and is not attacked.

    What is drawn depends on seed, template and attack alone: with `cache`, a run that was killed and starts again
    comes to the same result and runs only what is missing.

    Args:
        model: a language model, or a classifier of texts, which reads the filled template.
        data: examples.
        attacks: stresstest, checklist, deepwordbug, textbugger, textfooler (needs `embeddings`), bertattack (needs
            `masked_lm`), semantic (needs `semantic`, which also adds it).
        templates: prompts with `{content}` once; by default the data set's own (`TASK_PROMPTS`).
        words: what a language model answers for each class, in the order of `data.label_names`; by default the data
            set's own. A classifier has none.
        scoring: likelihood (the likeliest of the words), or generated (the word that the model says).
        normalise: divide log-likelihoods by the number of a word's tokens.
        suffix: end, behind the template's last character, or before, directly before `{content}`.
        as_promptbench: start searches and place suffixes as PromptBench does; `suffix` then has no effect and has to
            be left out. Needs TextAttack for suffixes too.
        limit: only so many examples, drawn by the seed.
        embeddings: a file of word vectors, for the neighbours of textfooler and textbugger.
        masked_lm: a directory or hub id of a masked language model, for bertattack.
        encoder: a directory or hub id of a sentence encoder, for the least similarity of textbugger, textfooler and
            bertattack; without one that limit is left out, and the result says so.
        semantic: "promptbench", the rewritten prompts of that package, or a text file with one a line.
        cache: a file where the model's answers are kept.
        seed: draws examples, changes of characters, and resamples.

    Raises:
        InputError: an unknown attack or option, a template without `{content}`, no templates or words where the data
            have none of their own, words that do not fit the classes, or a resource that is missing.
    """
    named = _checked_attacks(attacks, semantic)
    _check_options(suffix, as_promptbench, seed, data)
    known = data.name in SOURCES and data.label_names == SOURCES[data.name].labels
    if limit is not None:
        data = data.sample(limit, seed=seed)
    own = TASK_PROMPTS.get(data.name) if known else None
    shown = tuple(templates) if templates is not None else _own(own, data, "templates").templates
    labels, spoken = _classes(model, data, words, own)
    contents = [content_of(data.name, text) if known else text for text in data.texts]
    candidates = rewritten(semantic, data.name) if semantic is not None else ()
    _check_templates(shown, candidates)
    resources: dict[str, Any] = dict(embeddings=embeddings, masked_lm=masked_lm, encoder=encoder)
    recipes = [_recipe(name, candidates, resources) for name in named]
    evaluator = Evaluator(model, words=spoken, scoring=scoring, normalise=normalise, cache=cache)
    judge = Judge(evaluator, contents, labels)
    protected = spoken if spoken is not None else data.label_names
    clean = judge.right(shown)
    found: dict[str, list[tuple[str, int] | None]] = {name: [] for name in named}
    with _progress() as bar:
        task = bar.add_task("attacks", total=len(recipes) * len(shown))
        for each in recipes:
            for number, template in enumerate(shown):
                bar.update(task, description=f"{each.name}, template {number + 1}")
                place = None
                if clean[number].any():
                    place = _attacked(each, template, judge, protected, suffix, seed, as_promptbench)
                found[each.name].append(place)
                bar.advance(task)
    options: dict[str, Any] = {
        "attacks": list(named),
        "templates": list(shown),
        "words": list(spoken) if spoken is not None else None,
        "scoring": scoring,
        "normalise": normalise,
        "suffix": suffix,
        "as_promptbench": as_promptbench,
        "limit": limit,
        **{name: str(value) if value is not None else None for name, value in resources.items()},
        "semantic": str(semantic) if semantic is not None else None,
    }
    origin = {"name": data.name, "split": data.split, "fingerprint": data.fingerprint, "examples": len(data)}
    right = {
        name: [judge.right([place[0]])[0] if place is not None else None for place in places]
        for name, places in found.items()
    }
    average, per_template, per_attack = measured(clean, right, recipes, found, seed)
    return PromptAttack(
        provenance={**record_provenance(model.source, options=options, seed=seed), "data": origin},
        templates=shown,
        clean=per_template,
        average_clean=average,
        attacks=per_attack,
        cost=Cost(evaluator.asked, evaluator.run, evaluator.seconds),
        notes=tuple(_notes(clean, labels, candidates, spoken)),
    )


def _attacked(
    each: Recipe,
    template: str,
    judge: Judge,
    protected: Sequence[str],
    suffix: str,
    seed: int,
    as_promptbench: bool,
) -> tuple[str, int]:
    """The worst prompt that an attack finds for a template, and how many it tried."""
    if each.name == SEMANTIC:
        return tried_all(template, each.suffixes, judge)
    if each.suffixes:
        where = PROMPTBENCH if as_promptbench else suffix
        candidates = [with_suffix(template, text, where) for text in each.suffixes]
        # of several that are as bad PromptBench takes the first in the alphabet: TextAttack sorts candidates
        return tried_all(template, sorted(candidates) if as_promptbench else candidates, judge)
    return searched(each, template, judge, words=protected, seed=seed, as_promptbench=as_promptbench)


def _recipe(name: str, candidates: Sequence[str], resources: dict[str, Any]) -> Recipe:
    if name == SEMANTIC:
        ran = (f"{len(candidates)} rewritten prompts, the same for every template, all tried",)
        return Recipe(name, None, (), None, ran, suffixes=tuple(candidates))
    return recipe(name, flavour="prompt", **resources)


def _checked_attacks(attacks: Sequence[str], semantic: str | Path | None) -> tuple[str, ...]:
    if isinstance(attacks, str):
        raise InputError(f"attacks is the text {attacks!r}; give a list of names of {', '.join(ATTACKS)}")
    for name in attacks:
        if name not in ATTACKS:
            raise InputError(
                f"unknown attack {name!r}; allowed are {', '.join(ATTACKS)}{did_you_mean(str(name), ATTACKS)}"
            )
    named = tuple(dict.fromkeys([*attacks, *([SEMANTIC] if semantic is not None else [])]))
    if not named:
        raise InputError(f"no attack was given; give at least one of {', '.join(ATTACKS)}")
    if SEMANTIC in named and semantic is None:
        raise InputError("the attack semantic needs rewritten prompts: give semantic, 'promptbench' or a text file")
    return named


def _check_options(suffix: str, as_promptbench: bool, seed: int, data: TextData) -> None:
    if suffix not in PLACES:
        raise InputError(f"suffix is {suffix!r}; allowed are {', '.join(PLACES)}{did_you_mean(str(suffix), PLACES)}")
    if not isinstance(as_promptbench, bool):
        raise InputError(f"as_promptbench is {as_promptbench!r}; allowed is true or false")
    if as_promptbench and suffix != PLACES[0]:
        raise InputError(f"as_promptbench places suffixes as PromptBench does; leave out suffix {suffix!r}, or it")
    if seed < 0:
        raise InputError(f"seed is {seed}; allowed is a whole number from 0 on")
    if not isinstance(data, TextData):
        raise InputError(f"data is {type(data).__name__}; allowed are labelled texts (load_text)")
    if not len(data):
        raise InputError(f"{data.name} ({data.split}) has no example")


def _check_templates(templates: Sequence[str], candidates: Sequence[str]) -> None:
    if not templates:
        raise InputError("no template was given; give at least one, with {content} where the text stands")
    for text in (*templates, *candidates):
        Template(text)
        if SPLIT in text:
            raise InputError(f"the template {text!r:.60} holds {SPLIT}, at which TextAttack parts texts; remove it")
    if len(set(templates)) < len(templates):
        twice = next(text for text in templates if list(templates).count(text) > 1)
        raise InputError(f"the template {twice!r:.60} is given twice; give each once")


def _own(own: TaskPrompts | None, data: TextData, what: str) -> TaskPrompts:
    if own is None:
        raise InputError(
            f"{data.name} has no task prompts of its own: give {what}, and for a language model both templates and "
            f"words (of its own have {', '.join(TASK_PROMPTS)})"
        )
    return own


def _classes(
    model: Model, data: TextData, words: Sequence[str] | None, own: TaskPrompts | None
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """The examples' classes as the model numbers them, and a language model's words for them."""
    if model.is_classifier:
        if words is not None:
            raise InputError(f"{model.name} is a classifier and answers with its classes; give no words")
        return class_ids(model, data), None
    if isinstance(words, str):
        raise InputError(f"words is the text {words!r}; give a list with a word a class")
    spoken = tuple(words) if words is not None else _own(own, data, "words").words
    if len(spoken) != len(data.label_names):
        raise InputError(
            f"{len(spoken)} words were given ({', '.join(spoken)}); {data.name} has {len(data.label_names)} classes "
            f"({', '.join(data.label_names)}): give one for each, in this order"
        )
    return np.asarray(data.labels, dtype=np.int64), spoken


def _notes(clean: np.ndarray, labels: np.ndarray, candidates: Sequence[str], words: Sequence[str] | None) -> list[str]:
    notes = []
    nothing = [str(i) for i, right in enumerate(clean, 1) if not right.any()]
    if nothing:
        notes.append(f"under template {', '.join(nothing)} nothing is right: there is no drop to measure")
    share = np.bincount(labels).max() / len(labels)
    poor = [str(i) for i, right in enumerate(clean, 1) if 0 < right.mean() <= share]
    if poor:
        notes.append(
            f"under template {', '.join(poor)} the clean accuracy is no higher than always answering the most frequent "
            f"class, {share:.3f}: a drop from there says little"
        )
    if candidates and words is not None:
        without = sum(not all(word.lower() in prompt.lower() for word in words) for prompt in candidates)
        if without:
            notes.append(
                f"{without} of {len(candidates)} rewritten prompts do not name every answer ({', '.join(words)})"
            )
    return notes


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
