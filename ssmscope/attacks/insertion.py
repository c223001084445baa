"""Where in a text the same inserted phrase hurts a model most, and what an attacker gains who may choose the place.

The phrase of PromptBench's StressTest attack (Zhu et al. 2023, after Naik et al. 2018) is put at the end of a prompt. A
state-space model forgets, and leans on its last tokens (Wang et al. 2024; Baleen, section 4.3), so that the place
should matter as much as the phrase: here it is moved all along the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from ssmscope.attacks.curves import Questions, questions, true_log_odds, unknown_tokens
from ssmscope.attacks.position import percent, share
from ssmscope.bootstrap import Estimate, estimate, ratio, resampled_sums
from ssmscope.errors import InputError
from ssmscope.interp.views.tokens import shorten, visible
from ssmscope.limits import TEXTS, refuse_above, refuse_held
from ssmscope.results import Result, record_provenance
from ssmscope.tasks.text import TextData

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType

    from ssmscope.model import Model

FIRST, LAST = "before the template", "after the template"
"""The places outside the content, where there is a template."""

SHOWN = 6
"""How many phrases figure and terminal show."""


def insertion_sweep(
    model: Model,
    data: TextData,
    *,
    insert: str | Sequence[str] = " and true is true ",
    places: int | Sequence[float] = 11,
    template: str | None = None,
    words: Sequence[str] | None = None,
    scoring: str = "likelihood",
    limit: int | None = None,
    cache: str | Path | None = None,
    seed: int = 0,
) -> InsertionSweep:
    """Put a phrase between the words of every text, at one place after the other, and measure what it costs.

    Place p is behind the first ⌊p n + ½⌋ of a text's n words (what stands between white space): 0 is a prefix, 1 a
    suffix. With a template the places are those of the content, and two more are before and after the whole. The
    phrase's own outer white space is one space, and none at an end of the text. (The suffixes of PromptBench's
    StressTest, one of which is the default, have one place.)

    Every number has a 95 % bootstrap interval over examples. All are paired: clean texts, phrases and places share
    their resamples. A drop is relative, 1 − accuracy / clean accuracy. `worst` is the accuracy against an attacker who
    chooses, for each example, among the places that were measured: what is right at all of them.

    Args:
        insert: the phrase, or several, each of which has its own curve.
        places: how many, evenly from 0 to 1; or these shares.
        template: what a text is wrapped in, with {content} where the text goes. A language model has one: by default,
            with the words, the first of a known data set's own (`TASK_PROMPTS`).
        words: what a language model answers for each class of the data, in the order of `data.label_names`.
        scoring: of a language model: likelihood (the likeliest of the words), or generated (the word that it says, of
            which there are no log-odds).
        limit: only so many examples, drawn by the seed.
        cache: a file that keeps the model's answers, so that a run can be resumed.
        seed: draws examples and resamples.

    Raises:
        InputError: an empty phrase or one that is given twice, a place outside 0 to 1, data that does not fit the
            model, and what `Template` and `Evaluator` refuse.
    """
    phrases = _phrases(insert)
    shares = _shares(places)
    asked = questions(model, data, template=template, words=words, scoring=scoring, limit=limit, cache=cache, seed=seed)
    outside = (bool(asked.before.strip()), bool(asked.after.strip()))
    number = len(asked.contents) * (1 + len(phrases) * (len(shares) + sum(outside)))
    what = f"{len(phrases):,} phrases at {len(shares):,} places of {len(asked.contents):,} texts"
    refuse_held(number, what, "give fewer places, or a limit", most=TEXTS, unit="texts")
    texts = [asked.before + content + asked.after for content in asked.contents]
    for phrase in phrases:
        texts += [text for column in _attacked(asked, phrase, shares, outside) for text in column]
    scores = asked.evaluator.scores(texts).reshape(-1, len(asked.data), len(asked.classes))
    answers = asked.evaluator.answers(scores)
    spoken = scoring == "generated" and not model.is_classifier
    odds = None if spoken else true_log_odds(scores, asked.labels)
    right = answers == asked.labels
    where: list[float | None] = [*([None] if outside[0] else []), *shares, *([None] if outside[1] else [])]
    names = [*([FIRST] if outside[0] else []), *map(place_name, shares), *([LAST] if outside[1] else [])]
    curves = []
    for number, phrase in enumerate(phrases):
        rows = slice(1 + number * len(names), 1 + (number + 1) * len(names))
        measured = measure(
            right[0],
            right[rows],
            answers[rows] != answers[0],
            None if odds is None else odds[0],
            None if odds is None else odds[rows],
            seed,
        )
        placed = tuple(Place(name=n, share=s, **m) for n, s, m in zip(names, where, measured.places))
        curves.append(InsertionCurve(phrase, placed, measured.worst, measured.worst_drop))
    every = measure(right[0], right[1:], answers[1:] != answers[0], None, None, seed)
    options: dict[str, Any] = {
        "insert": list(phrases),
        "places": list(shares),
        "template": None if asked.template is None else asked.template.text,
        "words": None if asked.evaluator.words is None else list(asked.evaluator.words),
        "scoring": scoring,
        "limit": limit,
    }
    return InsertionSweep(
        provenance={**record_provenance(model.source, options=options, seed=seed), "data": asked.origin},
        clean=every.clean,
        clean_log_odds=None if odds is None else _mean(odds[0], seed),
        curves=tuple(curves),
        worst=every.worst,
        worst_drop=every.worst_drop,
        notes=tuple(_notes(model, phrases, answers, every.clean)),
    )


def inserted(text: str, phrase: str, words: int) -> str:
    """The text with the phrase behind so many of its words, single spaces around it."""
    found = list(re.finditer(r"\S+", text))
    if not words:
        start = found[0].start() if found else 0
        return f"{text[:start]}{phrase} {text[start:]}"
    at = found[words - 1].end()
    return f"{text[:at]} {phrase}{text[at:]}"


def place_name(place: float) -> str:
    """A share of a text's words as the views write it."""
    return f"{100 * place:.4g} %"


def _attacked(
    asked: Questions, phrase: str, shares: Sequence[float], outside: tuple[bool, bool]
) -> Iterable[list[str]]:
    """All texts with the phrase at each place, place by place."""
    contents = asked.contents
    whole = [asked.before + content + asked.after for content in contents]
    if outside[0]:
        yield [f"{phrase} {text}" for text in whole]
    for place in shares:
        moved = [inserted(c, phrase, math.floor(place * len(c.split()) + 0.5)) for c in contents]
        yield [asked.before + content + asked.after for content in moved]
    if outside[1]:
        yield [f"{text}{'' if text[-1:].isspace() else ' '}{phrase}" for text in whole]


def _phrases(insert: str | Sequence[str]) -> tuple[str, ...]:
    given = [insert] if isinstance(insert, str) else list(insert)
    wrong = [phrase for phrase in given if not isinstance(phrase, str) or not phrase.strip()]
    if wrong or not given:
        shown = repr(wrong[0]) if wrong else "nothing"
        raise InputError(f"{shown} was given to insert; give a phrase of at least one word")
    phrases = tuple(phrase.strip() for phrase in given)
    if len(set(phrases)) < len(phrases):
        twice = next(phrase for phrase in phrases if phrases.count(phrase) > 1)
        raise InputError(f"the phrase {twice!r} is given twice; give each once")
    return phrases


def _shares(places: int | Sequence[float]) -> tuple[float, ...]:
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
    if len(set(given)) < len(given):
        raise InputError(f"places names {next(p for p in given if given.count(p) > 1):g} twice; give each place once")
    return tuple(sorted(map(float, given)))


@dataclass(frozen=True)
class Place:
    """What is measured with the phrase at one place."""

    name: str
    share: float | None
    """Of the content's words, how many stand before the phrase; None outside the content."""
    accuracy: Estimate
    drop: Estimate
    """1 − accuracy / clean accuracy."""
    flipped: Estimate
    """The share of the examples that are right when clean whose prediction changes."""
    log_odds_change: Estimate | None
    """The mean change of log p / (1 − p) of the true class, in natural logarithms; None for generated answers."""
    worst_here: Estimate | None
    """The share of the examples whose log-odds are lowest at this place; places that tie have equal parts."""


@dataclass(frozen=True)
class InsertionCurve:
    """One phrase along the text."""

    phrase: str
    places: tuple[Place, ...]
    """From the first to the last."""
    worst: Estimate
    """Accuracy where the attacker chooses the place for each example: the share that is right at every place."""
    worst_drop: Estimate

    @property
    def hardest(self) -> Place:
        """The place of the lowest accuracy, the first of several."""
        return min(self.places, key=lambda place: place.accuracy.value)


@dataclass(frozen=True)
class InsertionSweep(Result, kind="insertion"):
    """Accuracy and log-odds with a phrase at every place of the texts."""

    clean: Estimate
    clean_log_odds: Estimate | None
    curves: tuple[InsertionCurve, ...]
    worst: Estimate
    """Accuracy where the attacker chooses phrase and place for each example."""
    worst_drop: Estimate
    notes: tuple[str, ...]

    @property
    def shown(self) -> tuple[InsertionCurve, ...]:
        """The phrases that figure and terminal show: of more than 6 those that cost most, in their order."""
        if len(self.curves) <= SHOWN:
            return self.curves
        kept = sorted(self.curves, key=lambda curve: curve.worst.value)[:SHOWN]
        return tuple(curve for curve in self.curves if any(curve is one for one in kept))

    @property
    def headline(self) -> str:
        model = self.provenance.get("model", "a model")
        curve = min(self.curves, key=lambda curve: curve.hardest.accuracy.value)
        hardest, phrase = curve.hardest, shorten(visible(curve.phrase), 32)
        choice = "the place" if len(self.curves) == 1 else "phrase and place"
        return (
            f"Insertion sweep of {model}: accuracy {self.clean.value:.3f} clean, {hardest.accuracy.value:.3f} with "
            f"“{phrase}” at its hardest place ({hardest.name}), {self.worst.value:.3f} where {choice} may differ by "
            "example"
        )

    def to_frame(self) -> DataFrame:
        """A row for the clean texts, and per phrase one for every place and one for the worst of each example.

        Columns: part ("clean", "place", "worst"), phrase, place, share, accuracy, drop (relative, in percent), flipped
        (of the examples that are right when clean), log_odds (the mean change; of the clean texts the mean itself) and
        worst_here; the 95 % interval of each is in columns ending in _low and _high. With several phrases the last row
        is the worst phrase and place of each example.
        """
        import pandas as pd

        rows = [_row("clean", None, None, None, accuracy=self.clean, log_odds=self.clean_log_odds)]
        for curve in self.curves:
            for one in curve.places:
                shown = dict(accuracy=one.accuracy, drop=one.drop.times(100), flipped=one.flipped)
                more = dict(log_odds=one.log_odds_change, worst_here=one.worst_here)
                rows.append(_row("place", curve.phrase, one.name, one.share, **shown, **more))
            worst = dict(accuracy=curve.worst, drop=curve.worst_drop.times(100))
            rows.append(_row("worst", curve.phrase, "any place", None, **worst))
        if len(self.curves) > 1:
            worst = dict(accuracy=self.worst, drop=self.worst_drop.times(100))
            rows.append(_row("worst", "any phrase", "any place", None, **worst))
        names = ["accuracy", "drop", "flipped"]
        names += ["log_odds", "worst_here"] if self.clean_log_odds is not None else []
        columns = ["part", "phrase", "place", "share", *(name + end for name in names for end in ("", "_low", "_high"))]
        return pd.DataFrame(rows, columns=columns)

    def figure(self) -> Figure:
        """Accuracy and the change of the log-odds against the place, a line with its band for each phrase."""
        from ssmscope.attacks.insertion_figure import draw

        return draw(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        yield Text(self.headline)
        for curve in self.shown:
            yield Text(f"\n“{visible(curve.phrase)}”", style="bold")
            table = Table(box=None, pad_edge=False)
            headings = ["place", "accuracy", "drop in %", "flipped"]
            headings += ["change of log-odds"] if self.clean_log_odds is not None else []
            for heading in headings:
                table.add_column(heading, justify="left" if heading == "place" else "right", no_wrap=True)
            table.add_row("clean", str(self.clean))
            for one in curve.places:
                change = [] if one.log_odds_change is None else [str(one.log_odds_change)]
                table.add_row(one.name, str(one.accuracy), percent(one.drop), share(one.flipped.value, "–"), *change)
            table.add_row("worst of each", str(curve.worst), percent(curve.worst_drop))
            yield table
            most = [one for one in curve.places if one.worst_here is not None]
            if most:
                where = max(most, key=lambda one: one.worst_here.value if one.worst_here is not None else 0.0)
                yield Text(f"Most often the lowest log-odds: {where.name}, of {where.worst_here} of the examples.")
        if len(self.curves) > SHOWN:
            yield Text(f"\nThese are the {SHOWN} of {len(self.curves)} phrases that cost most; the table holds all.")
        if len(self.curves) > 1:
            yield Text(f"\nThe worst phrase and place of each example: accuracy {self.worst}.")
        data = self.provenance["data"]
        yield Text(f"\n{data['examples']:,} examples of {data['name']} ({data['split']}); 95 % bootstrap intervals.")
        yield from (Text(f"Note: {note}.") for note in self.notes)


@dataclass(frozen=True)
class Measured:
    """The numbers of one phrase: those of every place by the names that `Place` gives them, and the worst."""

    clean: Estimate
    places: tuple[dict[str, Any], ...]
    worst: Estimate
    worst_drop: Estimate


def measure(
    clean: Bool[np.ndarray, " examples"],
    right: Bool[np.ndarray, "places examples"],
    changed: Bool[np.ndarray, "places examples"],
    clean_odds: Float[np.ndarray, " examples"] | None,
    odds: Float[np.ndarray, "places examples"] | None,
    seed: int,
) -> Measured:
    """All numbers of a phrase from what is right when clean and at each place, where the answer is another than the
    clean one, and the log-odds of the true class."""
    number, examples = right.shape
    columns = [clean[None], np.all(right, axis=0, keepdims=True), right, changed & clean]
    if odds is not None and clean_odds is not None:
        lowest = np.asarray(odds == odds.min(0))
        columns += [odds - clean_odds, lowest / lowest.sum(0)]
    sums = resampled_sums(np.concatenate(columns).T.astype(np.float64), seed=seed)
    rights, everywhere = sums[:, :1], sums[:, 1:2]
    each = [sums[:, 2 + i * number : 2 + (i + 1) * number] for i in range(len(columns) - 2)]
    drops, flipped = 1 - ratio(each[0], rights), ratio(each[1], rights)
    places = tuple(
        {
            "accuracy": estimate(each[0][:, i] / examples),
            "drop": estimate(drops[:, i]),
            "flipped": estimate(flipped[:, i]),
            "log_odds_change": estimate(each[2][:, i] / examples) if len(each) > 2 else None,
            "worst_here": estimate(each[3][:, i] / examples) if len(each) > 2 else None,
        }
        for i in range(number)
    )
    return Measured(
        clean=estimate(rights[:, 0] / examples),
        places=places,
        worst=estimate(everywhere[:, 0] / examples),
        worst_drop=estimate((1 - ratio(everywhere, rights))[:, 0]),
    )


def _mean(values: Float[np.ndarray, " examples"], seed: int) -> Estimate:
    return estimate(resampled_sums(values[:, None], seed=seed)[:, 0] / len(values))


def _notes(model: Model, phrases: Sequence[str], answers: np.ndarray, clean: Estimate) -> Iterable[str]:
    if clean.value == 0:
        yield "the clean accuracy is 0: there is no drop to measure"
    silent = float((answers == -1).mean())
    if silent:
        yield f"{100 * silent:.1f} % of the generated answers name no class; they count as wrong"
    for phrase in phrases:
        number, unknown = unknown_tokens(model, phrase)
        if unknown:
            shown = shorten(visible(phrase), 40)
            yield f"the tokenizer does not know {unknown} of the {number} tokens of “{shown}”"


def _row(
    part: str, phrase: str | None, place: str | None, at: float | None, **found: Estimate | None
) -> dict[str, Any]:
    row: dict[str, Any] = {"part": part, "phrase": phrase, "place": place, "share": at}
    for name, one in found.items():
        if one is not None:
            row |= {name: one.value, f"{name}_low": one.low, f"{name}_high": one.high}
    return row
