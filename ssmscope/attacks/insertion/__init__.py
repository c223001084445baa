"""Accuracy with a phrase inserted at every place of a text, and under an attacker who chooses the place.

PromptBench's StressTest attack (Zhu et al. 2023, after Naik et al. 2018) appends a phrase to a prompt. State-space
models forget and depend on their last tokens (Wang et al. 2024; Baleen, section 4.3), so the place should matter as
much as the phrase; here the phrase moves through the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from ssmscope.api.analysis import analysis
from ssmscope.api.dimensions import Dimension
from ssmscope.api.inputs import TEXT_MODELS, Data
from ssmscope.api.limits import DROP
from ssmscope.api.options import REPEATED, Cache, LabelWords, Limit, Metavar, Scoring, Seed, Template
from ssmscope.attacks.names import check_asked
from ssmscope.core.batching import refuse_above
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.attacks.insertion.result import InsertionSweep
    from ssmscope.core.model import Model
    from ssmscope.data.text import TextData


def checked_phrases(insert: str | Sequence[str]) -> tuple[str, ...]:
    given = [insert] if isinstance(insert, str) else list(insert)
    wrong = [phrase for phrase in given if not isinstance(phrase, str) or not phrase.strip()]
    if wrong or not given:
        shown = repr(wrong[0]) if wrong else "nothing"
        raise InputError(f"{shown} was given to insert; give a phrase of at least one word")
    phrases = tuple(phrase.strip() for phrase in given)
    if twice := [phrase for phrase in phrases if phrases.count(phrase) > 1]:
        raise InputError(f"the phrase {twice[0]!r} is given twice; give each once")
    return phrases


def checked_shares(places: int | Sequence[float]) -> tuple[float, ...]:
    allowed = "allowed are a number of places from 2 on, or shares from 0 to 1"
    if isinstance(places, int):
        if places < 2:
            raise InputError(f"places is {places!r}; {allowed}")
        refuse_above(10_000, places=places)
        return tuple(at / (places - 1) for at in range(places))
    given = tuple(places)
    wrong = [p for p in given if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1]
    if wrong or not given:
        raise InputError(f"places has {wrong[0]!r}; {allowed}" if wrong else f"places is empty; {allowed}")
    if twice := [place for place in given if given.count(place) > 1]:
        raise InputError(f"places names {twice[0]:g} twice; give each place once")
    return tuple(sorted(map(float, given)))


def _check(*, insert: str | Sequence[str], places: int | Sequence[float], **options: Any) -> None:
    checked_phrases(insert)
    checked_shares(places)
    check_asked(**options)


@analysis(
    "insertion",
    reads=Data("texts"),
    question="Where do the same words hurt most?",
    models=TEXT_MODELS,
    check=_check,
    sharded=True,
    scores={"insertion.drop": DROP},
    dimensions=(Dimension("A phrase anywhere", r"insertion\.drop", "drop at each text's worst place"),),
)
def insertion_sweep(
    model: Model,
    data: TextData,
    *,
    insert: Annotated[
        str | Sequence[str], "Inserted phrase; may be repeated, each phrase with its own curve.", REPEATED
    ] = " and true is true ",
    places: Annotated[
        int | Sequence[float],
        "Number of evenly spaced places from prefix to suffix, or shares of the words.",
        Metavar("N|X,…"),
    ] = 11,
    template: Template = None,
    words: LabelWords = None,
    scoring: Scoring = "likelihood",
    limit: Limit = None,
    cache: Cache = None,
    seed: Seed = 0,
) -> InsertionSweep:
    """Measure accuracy with a phrase inserted at every place of a text, from prefix to suffix.

    Place p is after the first ⌊p n + ½⌋ of a text's n words, split at white space: 0 is a prefix, 1 a suffix. With a
    template the places are those of the content, and two more are before and after the whole. By default template and
    words are the first of a known data set's own (`TASK_PROMPTS`). The phrase is separated by one space, and by none at
    an end of the text.

    Every number has a 95 % interval over examples: Wilson's of accuracies and other shares, else a bootstrap, paired:
    clean texts, phrases and places share their resamples. A drop is relative, 1 − accuracy / clean accuracy. `worst` is
    the accuracy against an attacker who chooses the place for each example: the share right at all measured places.

    Raises:
        InputError: an empty or repeated phrase, a place outside 0 to 1, data that do not fit the model, and what
            `Template` and `Evaluator` refuse.
    """
    from ssmscope.attacks.curves import questions
    from ssmscope.attacks.insertion.measure import attacked_texts, mean, measure, notes_on
    from ssmscope.attacks.insertion.result import FIRST, LAST, InsertionSweep, place_name
    from ssmscope.core.batching import MAX_TEXTS, refuse_held
    from ssmscope.core.bootstrap import share

    phrases, shares = checked_phrases(insert), checked_shares(places)
    asked = questions(model, data, template=template, words=words, scoring=scoring, limit=limit, cache=cache, seed=seed)
    spots: list[tuple[str, float | None]] = [(FIRST, None)] if asked.before.strip() else []
    spots += [(place_name(share), share) for share in shares]
    spots += [(LAST, None)] if asked.after.strip() else []
    number = len(asked.contents) * (1 + len(phrases) * len(spots))
    what = f"{len(phrases):,} phrases at {len(shares):,} places of {len(asked.contents):,} texts"
    refuse_held(number, what, "give fewer places, or a limit", most=MAX_TEXTS, unit="texts")
    texts = asked.wrapped(asked.contents)
    for phrase in phrases:
        texts += attacked_texts(asked, phrase, spots)
    answers, found = asked.answered(texts, -1)
    odds = None if scoring == "generated" else found
    curves = []
    for number, phrase in enumerate(phrases):
        rows = [0, *range(1 + number * len(spots), 1 + (number + 1) * len(spots))]
        own = None if odds is None else odds[rows]
        curves.append(measure(phrase, spots, answers[rows], asked.labels, own, seed))
    every = measure("", spots * len(phrases), answers, asked.labels, None, seed)
    clean = share(int((answers[0] == asked.labels).sum()), len(asked.labels))
    return InsertionSweep(
        provenance=asked.provenance(model, seed, insert=list(phrases), places=list(shares)),
        clean=clean,
        clean_log_odds=None if odds is None else mean(odds[0], seed),
        curves=tuple(curves),
        worst=every.worst,
        worst_drop=every.worst_drop,
        right=answers == asked.labels,
        notes=tuple(notes_on(model, phrases, answers, clean)),
    )
