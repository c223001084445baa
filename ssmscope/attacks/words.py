"""Attacks on single texts: how few changed words it takes until the model gives another answer.

TextAttack's searches (Morris et al. 2020), many at a time in lockstep, and HotFlip (Ebrahimi et al. 2018), which looks
at the model's gradients.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ssmscope.attacks.hotflip import CANDIDATES, Limits, hotflip
from ssmscope.attacks.lockstep import ACTIVE, draw_seed, lockstep
from ssmscope.attacks.offline import stopwords as stop_words
from ssmscope.attacks.parts import RECIPES as PARTS
from ssmscope.attacks.parts import Recipe, protect
from ssmscope.attacks.parts import recipe as recipe_of
from ssmscope.attacks.position import class_ids
from ssmscope.attacks.words_result import (
    FAILED,
    SKIPPED,
    SUCCESS,
    WORD,
    AttackedText,
    WordAttack,
    changed_words,
    measure,
)
from ssmscope.errors import InputError, did_you_mean
from ssmscope.evaluation import Evaluator, Template, label_words
from ssmscope.evaluation.template import CONTENT
from ssmscope.limits import refuse_above
from ssmscope.results import record_provenance
from ssmscope.tasks.text import TextData

if TYPE_CHECKING:
    from ssmscope.model import Model

HOTFLIP = "hotflip"
RECIPES = (*PARTS["words"], HOTFLIP)
"""All attacks, by name."""

OPTIONS = {
    "textbugger": ("embeddings", "encoder"),
    "textfooler": ("embeddings", "encoder"),
    "bertattack": ("masked_lm", "encoder"),
    "pwws": ("synonyms",),
    HOTFLIP: ("beam", "flips", "candidates", "stopwords"),
}
"""The options that are an attack's own."""

LETTERS = 4.5
"""So many characters a token has, about."""
FORKING = 2**22
"""From so many products a text on it pays to run common beginnings once (measured: at 2²⁰ it takes a fifth longer, at
2²³ a fifth less)."""

Scores = Callable[[Sequence[str]], Float[np.ndarray, "texts classes"]]


def word_attack(
    model: Model,
    data: TextData,
    *,
    recipe: str = "deepwordbug",
    template: str | None = None,
    words: Sequence[str] | None = None,
    limit: int | None = None,
    budget: int | None = None,
    embeddings: str | Path | None = None,
    masked_lm: str | Path | None = None,
    encoder: str | Path | None = None,
    synonyms: str | Path | None = None,
    beam: int = 1,
    flips: int | None = None,
    candidates: int = CANDIDATES,
    stopwords: bool = False,
    cache: str | Path | None = None,
    active: int = ACTIVE,
    seed: int = 0,
    progress: bool = True,
) -> WordAttack:
    """Change the words of every text until the model gives another answer, and measure how often that is possible.

    The goal is any class but the true one (untargeted); a text's score is 1 − p(true), p the softmax of the class
    scores. Texts whose answer is wrong without an attack are skipped. Numbers have 95 % bootstrap intervals over
    examples.

    Attacks are TextAttack's: deepwordbug (changes of characters), textbugger, pwws and textfooler (synonyms, nearest
    neighbours), bertattack (words of a masked language model), checklist (contractions, numbers). Each text is attacked
    as TextAttack's own loop attacks it, text after text, when `random` and `numpy.random` are seeded with
    `draw_seed(seed, row)` before the text in that row of the data; only the model's scores are computed for many texts
    together. hotflip (see `ssmscope.attacks.hotflip`) sees the model's gradients, and knows no limit on a text's
    meaning: it finds the words that the answer hangs on.

    With `cache`, a run that was killed and starts again comes to the same result and runs only what is missing.

    Args:
        model: a classifier of texts, or a language model with `words`.
        data: examples. The two sentences of a pair stay apart as they are.
        recipe: deepwordbug, textbugger, textfooler, bertattack, pwws, checklist or hotflip.
        template: a prompt with `{content}` once, where the text stands. What stands around it is not attacked, and the
            label words within the text are not either.
        words: what a language model says for each class, in the order of `data.label_names`. A classifier has none.
        limit: only so many examples, drawn by the seed.
        budget: how many texts the model is asked about for an example at most, the clean one among them.
        embeddings: a file of word vectors, for textfooler and the neighbours of textbugger.
        masked_lm: a directory or hub id of a masked language model, for bertattack.
        encoder: a directory or hub id of a sentence encoder, for the least similarity of textbugger, textfooler and
            bertattack; without one that limit is left out, and the result says so.
        synonyms: a .json or .csv file of synonyms, for pwws; by default WordNet's, where NLTK has it.
        beam: of hotflip, how many texts are kept from one flip to the next.
        flips: of hotflip, how many words are replaced at most; by default all that can be.
        candidates: of hotflip, how many flips of each kept text the model is asked about.
        stopwords: of hotflip, whether stop words may be replaced too.
        cache: a file where the model's answers are kept.
        active: how many examples TextAttack's searches attack at a time; hotflip attacks all together.
        seed: draws examples, changes of characters, and resamples.
        progress: whether to show it on stderr, where that is a terminal.

    Raises:
        InputError: an unknown attack or option, an option of another attack, a resource that is missing, data of other
            classes than the model's, or label words that do not fit.
    """
    own: dict[str, Any] = dict(embeddings=embeddings, masked_lm=masked_lm, encoder=encoder, synonyms=synonyms)
    own |= dict(beam=beam, flips=flips, candidates=candidates, stopwords=stopwords)
    _check(recipe, data, own, limit=limit, budget=budget, active=active, seed=seed)
    evaluator = Evaluator(model, words=words, cache=cache, fork=_forks(model, data.texts))
    classes = class_ids(model, data) if model.is_classifier else _named_classes(data, evaluator.words or ())
    prompt = Template(CONTENT if template is None else template)
    spoken = evaluator.words or ()
    attack: Recipe | None = None
    if recipe != HOTFLIP:  # what it lacks is said before the model runs
        attack = recipe_of(recipe, flavour="words", **{name: own[name] for name in OPTIONS.get(recipe, ())})
    rows = sampled_rows(len(data), limit, seed)
    data, labels = data.take(rows), classes[rows].tolist()

    def scores(texts: Sequence[str]) -> Float[np.ndarray, "texts classes"]:
        return evaluator.scores([prompt.fill(text) for text in texts])

    clean = probabilities(scores(data.texts))
    right = [place for place, found in enumerate(clean) if found.argmax() == labels[place]]
    texts, true = [data.texts[place] for place in right], [labels[place] for place in right]
    kept, whose = (frozenset[str](), "") if stopwords else stop_words()
    limits = _limits(own, budget, kept, spoken)
    with _progress(len(right), progress) as ended:
        if attack is None:
            ids = label_words(model, spoken, after=prompt.fill(texts[0])).ids if spoken and texts else None
            ends = _flipped(model, texts, true, scores, ended, template=prompt, label_ids=ids, limits=limits)
        else:
            seeds = [draw_seed(seed, rows[place]) for place in right]
            ends = _searched(attack, texts, true, clean[right], scores, ended, spoken, budget, seeds, active)
    found = dict(zip(right, ends))
    examples = tuple(
        _example(row, labels[place], text, clean[place], found.get(place))
        for place, (row, text) in enumerate(zip(rows, data.texts))
    )
    options = {
        "recipe": recipe,
        "template": template,
        "words": list(spoken) or None,
        "limit": limit,
        "budget": budget,
        **{name: str(value) if isinstance(value, Path) else value for name, value in own.items()},
    }
    origin = {"name": data.name, "split": data.split, "fingerprint": data.fingerprint, "examples": len(data)}
    return WordAttack(
        provenance={**record_provenance(model.source, options=options, seed=seed), "data": origin},
        recipe=recipe,
        labels=tuple(model.labels or data.label_names),
        examples=examples,
        **measure(examples, seed),
        ran=_described(limits, whose) if attack is None else attack.ran,
        left_out=() if attack is None else attack.left_out,
    )


class End(NamedTuple):
    """Where an attack on one text ended, and what it asked of the model."""

    text: str
    answer: int
    true: float
    """The probability of the true class."""
    queries: int
    gradients: int = 0


def _searched(
    attack: Recipe,
    texts: Sequence[str],
    labels: Sequence[int],
    clean: Float[np.ndarray, "texts classes"],
    scores: Scores,
    ended: Callable[[int], None],
    spoken: Sequence[str],
    budget: int | None,
    seeds: Sequence[int],
    active: int,
) -> list[End]:
    """TextAttack's searches, in lockstep."""
    from ssmscope.attacks.words_search import search

    limits = (protect(spoken, None),) if spoken else ()
    searches = [
        partial(search, recipe=attack, text=text, label=label, clean=row, budget=budget, constraints=limits)
        for text, label, row in zip(texts, labels, clean)
    ]
    found = lockstep(
        searches,
        lambda asked: list(probabilities(scores(asked))),
        seeds=seeds,
        active=active,
        ended=lambda _: ended(1),
    )
    return [
        End(each.text, int(each.probabilities.argmax()), float(each.probabilities[label]), each.queries)
        for each, label in zip(found, labels)
    ]


def _flipped(
    model: Model, texts: Sequence[str], labels: Sequence[int], scores: Scores, ended: Callable[[int], None], **how: Any
) -> list[End]:
    found = hotflip(model, texts, labels, scores, ended=ended, **how)
    return [
        End(
            text=each.text,
            answer=int(each.scores.argmax()),
            true=float(probabilities(each.scores[None])[0, label]),
            queries=each.queries,
            gradients=each.gradients,
        )
        for each, label in zip(found, labels)
    ]


def _limits(own: dict[str, Any], budget: int | None, kept: frozenset[str], spoken: Sequence[str]) -> Limits:
    absent = frozenset(part.lower() for word in spoken for part in WORD.findall(word))
    return Limits(
        beam=own["beam"],
        flips=own["flips"],
        candidates=own["candidates"],
        budget=budget,
        kept=kept | absent,
        absent=absent,
    )


def _described(limits: Limits, whose: str) -> tuple[str, ...]:
    """The parts of HotFlip as it runs, in words."""
    return (
        f"the {limits.candidates} best flips by the gradient",
        "words of one token for others",
        *([f"no stop word ({whose})"] if whose else []),
        "greedy" if limits.beam == 1 else f"a beam of {limits.beam}",
        *([f"at most {limits.flips} word{'s' if limits.flips > 1 else ''}"] if limits.flips is not None else []),
    )


def probabilities(scores: Float[np.ndarray, "texts classes"]) -> Float[np.ndarray, "texts classes"]:
    """The softmax of class scores in float32, as TextAttack computes it: texts that it takes for equal are equal."""
    return torch.from_numpy(scores).float().softmax(-1).numpy()


def sampled_rows(number: int, limit: int | None, seed: int) -> list[int]:
    """The rows that `TextData.sample` takes: an example keeps its number, and with it its attack, under any limit."""
    if limit is None or limit >= number:
        return list(range(number))
    return sorted(random.Random(seed).sample(range(number), limit))


def _example(row: int, label: int, text: str, clean: Float[np.ndarray, " classes"], end: End | None) -> AttackedText:
    before, answer = float(clean[label]), int(clean.argmax())
    status = SKIPPED if end is None else FAILED if end.answer == label else SUCCESS
    end = end or End(text, answer, before, 1)
    words, changed = changed_words(text, end.text)
    return AttackedText(
        row=row,
        status=status,
        label=label,
        clean=answer,
        answer=end.answer,
        before=before,
        after=end.true,
        queries=end.queries,
        gradients=end.gradients,
        words=words,
        changed=changed,
        text=text,
        attacked=end.text,
    )


def _forks(model: Model, texts: Sequence[str]) -> bool:
    """Whether a text's beginning costs more to run again than to continue from."""
    weights = sum(weight.numel() for mixer in model.mixers for weight in mixer.parameters())
    letters = sum(map(len, texts)) / len(texts)
    return weights * letters / LETTERS > FORKING


def _named_classes(data: TextData, words: Sequence[str]) -> np.ndarray:
    if len(words) != len(data.label_names):
        raise InputError(
            f"{len(words)} words were given ({', '.join(words)}); {data.name} has {len(data.label_names)} classes "
            f"({', '.join(data.label_names)}): give one for each, in this order"
        )
    return np.asarray(data.labels, dtype=np.int64)


def _check(recipe: str, data: Any, own: dict[str, Any], **numbers: int | None) -> None:
    if recipe not in RECIPES:
        raise InputError(
            f"unknown recipe {recipe!r}; allowed are {', '.join(RECIPES)}{did_you_mean(str(recipe), RECIPES)}"
        )
    if not isinstance(data, TextData):
        raise InputError(f"data is {type(data).__name__}; allowed are labelled texts (load_text)")
    if not len(data):
        raise InputError(f"{data.name} ({data.split}) has no example")
    defaults = {name: each.default for name, each in inspect.signature(word_attack).parameters.items()}
    for name, value in own.items():
        if value != defaults[name] and name not in OPTIONS.get(recipe, ()):
            whose = " and ".join(other for other, names in OPTIONS.items() if name in names)
            raise InputError(f"{name} is an option of {whose}; {recipe} has none of that name: leave it out")
    numbers |= {name: own[name] for name in ("beam", "flips", "candidates")}
    for name, number in numbers.items():
        least = 0 if name == "seed" else 1
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
            raise InputError(f"{name} is {number!r}; allowed is a whole number from {least} on")
    refuse_above(1000, beam=own["beam"])


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where that is a terminal, and what is called with the number of examples that have ended."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as bar:
        task = bar.add_task("examples", total=total)
        yield lambda number: bar.advance(task, number)
