"""Attacks on single texts: few changed words that change the model's answer.

These are TextAttack's searches (Morris et al. 2020), many at a time in lockstep, and HotFlip (Ebrahimi et al. 2018),
which uses the model's gradients.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ssmscope.api.analysis import analysis
from ssmscope.api.dimensions import Dimension
from ssmscope.api.inputs import TEXT_MODELS, Data
from ssmscope.api.limits import SHARE
from ssmscope.api.options import (
    NO_EFFECT,
    Cache,
    Embeddings,
    Encoder,
    LabelWords,
    Limit,
    MaskedLM,
    Metavar,
    OneOf,
    Progress,
    Range,
    Reads,
    Seed,
    Template,
)
from ssmscope.attacks.names import ACTIVE, ATTACKS, CANDIDATES, HOTFLIP, HOTFLIP_OPTIONS, check_asked, on_words
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from jaxtyping import Float
    from ssmscope.attacks.words.result import WordAttack
    from ssmscope.core.model import Model
    from ssmscope.data.text import TextData


def check_words(*, recipe: str, **options: Any) -> None:
    """Raise InputError for options of another attack, and for templates or label words that are not usable."""
    check_asked(**options)
    declared = inspect.signature(word_attack).parameters
    read = {HOTFLIP: HOTFLIP_OPTIONS, **{name: ATTACKS[name].options for name in on_words()}}
    for name in dict.fromkeys(name for names in read.values() for name in names):
        if options[name] != declared[name].default and name not in read[recipe]:
            whose = " and ".join(other for other, names in read.items() if name in names)
            raise InputError(f"{name}=… is an option of {whose}; {recipe} has none of that name: leave it out")


RUN = r"[^],]+(?:, \d+ queries)?"
"""Pattern of a recipe's name, and of its budget if it has one, in the names of scores."""


@analysis(
    "words",
    reads=Data("texts"),
    question="How few changed words change its answer?",
    models=TEXT_MODELS,
    dtype="float32",  # Gradients need the precision.
    check=check_words,
    settings="beam flips candidates stopwords active",
    scores={"words.success[RECIPE]": SHARE, "words.accuracy[RECIPE]": SHARE},
    dimensions=(
        Dimension("Words, 1 changed", rf"words\.accuracy\[{RUN}, 1 word\]", "accuracy under attack"),
        Dimension("Words, 2 changed", rf"words\.accuracy\[{RUN}, 2 words\]", "accuracy under attack"),
        Dimension("Words, any number", rf"words\.accuracy\[{RUN}\]", "accuracy under attack"),
    ),
)
def word_attack(
    model: Model,
    data: TextData,
    *,
    recipe: Annotated[
        str,
        f"{', '.join(on_words())}, or {HOTFLIP} (white box).",
        OneOf("attacks.names:on_words", (HOTFLIP,)),
        Metavar("NAME"),
    ] = "deepwordbug",
    template: Template = None,
    words: LabelWords = None,
    budget: Annotated[int | None, "Maximum queries per example, including the clean text.", Range(1)] = None,
    beam: Annotated[int, "hotflip: texts kept from one flip to the next; 1 is greedy.", Range(1, 1000)] = 1,
    flips: Annotated[int | None, "hotflip: maximum number of changed words; by default no limit.", Range(1)] = None,
    candidates: Annotated[int, "hotflip: flips of each kept text that the model evaluates.", Range(1)] = CANDIDATES,
    stopwords: Annotated[bool, "hotflip: also replace stop words."] = False,
    embeddings: Embeddings = None,
    masked_lm: MaskedLM = None,
    encoder: Encoder = None,
    synonyms: Annotated[
        str | Path | None, "pwws: a json of lists by word, or a csv of pairs; by default WordNet's.", Reads("file")
    ] = None,
    limit: Limit = None,
    seed: Seed = 0,
    cache: Cache = None,
    active: Annotated[int, "Number of examples that TextAttack attacks at a time.", Range(1), NO_EFFECT] = ACTIVE,
    progress: Progress = True,
) -> WordAttack:
    """Attack single texts by changed words, with TextAttack's recipes or HotFlip. A killed run continues.

    The goal is any class but the true one (untargeted); a text's score is 1 − p(true), p the softmax of the class
    scores. Texts answered wrongly without an attack are skipped. Numbers have 95 % intervals over examples: Wilson's of
    accuracies and success, else bootstrap.

    TextAttack's recipes are deepwordbug (changes of characters), textbugger, pwws and textfooler (synonyms, nearest
    neighbours), bertattack (words of a masked language model) and checklist (contractions, numbers). Each text is
    attacked exactly as in TextAttack's own loop with `random` and `numpy.random` seeded by `draw_seed(seed, row)`
    before the text in that row of the data; only the model's scores are computed for many texts together. hotflip (see
    `ssmscope.attacks.words.hotflip`) does not preserve a text's meaning: it finds the words that the answer depends on,
    and attacks all examples together.

    With `cache`, a run that was killed and starts again has the same result and runs only what is missing.

    Args:
        model: a classifier of texts, or a language model with `words`.
        data: examples. The separator between the two sentences of a pair stays.
        template: the text around the content is not attacked, nor are label words within the content.
        words: a classifier has none.
        embeddings: for textfooler and the neighbours of textbugger.
        masked_lm: for bertattack.
        encoder: for textbugger, textfooler and bertattack; without one the result says so.
        synonyms: WordNet's need NLTK.

    Raises:
        InputError: an option of another attack, a missing resource, data of other classes than the model's, or label
            words that do not fit.
    """
    import torch
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.attacks import offline, recipes
    from ssmscope.attacks.curves import check_data
    from ssmscope.attacks.words.hotflip import Limits, hotflip
    from ssmscope.attacks.words.lockstep import draw_seed, lockstep, sampled_rows
    from ssmscope.attacks.words.result import WORD, AttackedText, Outcome, WordAttack, measure
    from ssmscope.core.progress import on_stderr, progress_bar
    from ssmscope.data.prompts import CONTENT
    from ssmscope.evaluation import Evaluator, Template, label_words
    from ssmscope.interp.labelled import class_ids, word_ids

    check_data(data)
    own: dict[str, Any] = dict(embeddings=embeddings, masked_lm=masked_lm, encoder=encoder, synonyms=synonyms)
    own |= dict(beam=beam, flips=flips, candidates=candidates, stopwords=stopwords)
    evaluator = Evaluator(model, words=words, cache=cache)
    answers = evaluator.words or ()
    classes = class_ids(model, data) if model.is_classifier else word_ids(data, answers)
    prompt = Template(CONTENT if template is None else template)
    # A missing resource is reported before the model runs.
    given = {name: own[name] for name in (HOTFLIP_OPTIONS if recipe == HOTFLIP else ATTACKS[recipe].options)}
    attack = recipes.recipe(recipe, flavour="words", **given) if recipe != HOTFLIP else None
    rows = sampled_rows(len(data), limit, seed)
    data, labels = data.take(rows), classes[rows].tolist()

    def scores(texts: Sequence[str]) -> Float[np.ndarray, "texts classes"]:
        return evaluator.scores([prompt.fill(text) for text in texts])

    def probabilities(scores: Float[np.ndarray, "texts classes"]) -> Float[np.ndarray, "texts classes"]:
        """Compute the softmax in float32 as TextAttack does, so that ties are the same."""
        return torch.from_numpy(scores).float().softmax(-1).numpy()

    clean = probabilities(scores(data.texts))
    right = [place for place, found in enumerate(clean) if found.argmax() == labels[place]]
    texts, true = [data.texts[place] for place in right], [labels[place] for place in right]
    kept, whose = (frozenset[str](), "") if stopwords else offline.stopwords()
    absent = frozenset(part.lower() for word in answers for part in WORD.findall(word))
    limits = Limits(beam, flips, candidates, budget, kept | absent, absent)
    with progress_bar(on_stderr(progress)) as bar:
        ended = functools.partial(bar.advance, bar.add_task("examples", total=len(right)))
        if attack is None:
            ids = label_words(model, answers, after=prompt.fill(texts[0])).ids if answers and texts else None
            ends = hotflip(model, texts, true, scores, template=prompt, label_ids=ids, limits=limits, ended=ended)
            shares = [probabilities(end.best.scores[None])[0] for end in ends]
            outcomes = [Outcome(e.best.text, share, e.queries, e.gradients) for e, share in zip(ends, shares)]
        else:
            from ssmscope.attacks.words.goal import search

            seeds = [draw_seed(seed, rows[place]) for place in right]
            guards = (recipes.protect(answers, None),) if answers or not all(map(str.isascii, texts)) else ()
            how: dict[str, Any] = dict(recipe=attack, budget=budget, constraints=guards)
            starts = zip(texts, true, clean[right])
            searches = [functools.partial(search, text=t, label=true, clean=row, **how) for t, true, row in starts]

            def answer(texts: Sequence[str]) -> list[np.ndarray]:
                return list(probabilities(scores(texts)))

            outcomes = lockstep(searches, answer, seeds=seeds, active=active, ended=lambda _: ended(1))
    found = dict(zip(right, outcomes))
    examples = tuple(
        AttackedText.of(row, labels[place], text, clean[place], found.get(place))
        for place, (row, text) in enumerate(zip(rows, data.texts))
    )
    options = call_options(words=list(answers) or None)
    return WordAttack(
        provenance=record_provenance(model.source, options=options, seed=seed, data=data),
        recipe=recipe,
        labels=tuple(model.labels or data.label_names),
        examples=examples,
        **measure(examples, seed),
        ran=limits.described(whose) if attack is None else attack.ran,
        left_out=() if attack is None else attack.left_out,
    )
