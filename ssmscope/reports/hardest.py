"""Examples of a report that attacks break: the hardest ones, the worst findings, and what is asked about them next."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ssmscope.api.analysis import LOADING_OPTIONS, Call
from ssmscope.core.ties import descending
from ssmscope.errors import InputError
from ssmscope.reports.intervals import interval
from ssmscope.reports.scores import LOWER, Score, scores
from ssmscope.reports.store import Report, ReportEntry

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.data.text import TextData
    from ssmscope.reports.plan import Plan, PlannedCall, PlannedModel

EXPLAINED, PATCHED = "The hardest examples: what their answers rest on", "The hardest examples: where the attack enters"
"""Headings of the analyses of the hardest examples."""
MAX_PATCHED = 3
"""Maximum number of texts that are patched on each model."""
WORST = 3
"""Number of worst findings."""
HARMS = r"(position|prompts|insertion|overflow|noise)\.drop(\[(?!\d).*\])?|words\.success\[.*\]|poison\.beyond\[.*\]"
"""Pattern of the scores that are losses of right answers."""


class Broken(NamedTuple):
    """A right answer that an attack changes."""

    model: str
    entry: ReportEntry
    text: str
    attacked: str | None
    """The changed text; None if the change is not one of text."""
    how: str
    """The attack in words, such as "2 of 14 words changed by deepwordbug"."""


@dataclass(frozen=True)
class Hard:
    """A hard example: its text, and all that changes its answer."""

    text: str
    broken: tuple[Broken, ...]


class Finding(NamedTuple):
    """A loss of right answers, with an example of it."""

    score: Score
    entry: ReportEntry
    example: Broken | None


def broken_by(entry: ReportEntry) -> Iterator[Broken]:
    """Yield the right answers that an entry's attack changes, each once; nothing for analyses that are no attacks, or
    if the data cannot be read again."""
    for result in entry.results:
        find = _FINDERS.get(result.kind)
        if find is None or len(entry.models) != 1:
            continue
        for text, attacked, how in find(result, entry):
            yield Broken(entry.models[0], entry, text, attacked, how)


def hardest(report: Report, number: int) -> tuple[Hard, ...]:
    """Return the texts whose right answers are changed by most analyses and models, the hardest first; of texts with as
    many the one that comes first in the alphabet."""
    found: dict[str, list[Broken]] = {}
    for entry in report.entries:
        for one in broken_by(entry):
            found.setdefault(one.text, []).append(one)
    order = sorted(found, key=lambda text: (-len(found[text]), text))
    return tuple(Hard(text, tuple(found[text])) for text in order[:number])


def worst_findings(report: Report) -> tuple[Finding, ...]:
    """Return the analyses that surely lose most, by the lower ends of their intervals, which are above 0, each with its
    worst model and the first example."""
    most: dict[str, tuple[float, Score, ReportEntry]] = {}
    for entry in report.entries:
        for result in entry.results:
            for one in scores(result, entry.models):
                low = interval(one).low
                if one.better != LOWER or not re.fullmatch(HARMS, one.name) or math.isnan(low):
                    continue
                if one.name.startswith("overflow.drop[before"):  # The control.
                    continue
                if entry.heading not in most or low > most[entry.heading][0]:
                    most[entry.heading] = low, one, entry
    surely = [found for found in most.values() if found[0] > 0]
    order = [surely[at] for at in descending(np.array([low for low, *_ in surely]))[:WORST]]
    return tuple(Finding(score, entry, next(broken_by(entry), None)) for _, score, entry in order)


# ---- what each attack breaks


def _words(result: Any, entry: ReportEntry) -> Iterator[tuple[str, str | None, str]]:
    for one in result.successes:
        yield one.text, one.attacked, f"{one.changed} of {one.words} words changed by {result.recipe}"


def _noise(result: Any, entry: ReportEntry) -> Iterator[tuple[str, str | None, str]]:
    from ssmscope.attacks.noise.typos import with_typos

    data = _examples(entry, result)
    for row, place in _first_wrong(result.right) if data is not None else ():
        rate, text = result.levels[place].rate, data.texts[row]  # type: ignore[union-attr]
        typed = with_typos(text, rate, result.provenance["seed"])
        yield text, typed, f"typing errors at a rate of {100 * rate:g} %"


def _position(result: Any, entry: ReportEntry) -> Iterator[tuple[str, str | None, str]]:
    data = _examples(entry, result)
    for row, place in _first_wrong(result.right[: 1 + len(result.regions)]) if data is not None else ():
        how = f"tokens at {result.regions[place].region} replaced by {result.replaced_by}"
        yield data.texts[row], None, how  # type: ignore[union-attr]


def _insertion(result: Any, entry: ReportEntry) -> Iterator[tuple[str, str | None, str]]:
    from ssmscope.attacks.insertion.measure import inserted

    data = _examples(entry, result)
    spots = [(curve.phrase, place) for curve in result.curves for place in curve.places]
    for row, at in _first_wrong(result.right) if data is not None else ():
        phrase, place = spots[at]
        text = data.texts[row]  # type: ignore[union-attr]
        words = None if place.share is None else math.floor(place.share * len(text.split()) + 0.5)
        yield text, None if words is None else inserted(text, phrase, words), f"“{phrase}” inserted at {place.name}"


def _overflow(result: Any, entry: ReportEntry) -> Iterator[tuple[str, str | None, str]]:
    data = _examples(entry, result)
    for curve, right in zip(result.curves, result.right):
        if curve.where != "after" or data is None:
            continue
        for row, at in _first_wrong(right):
            yield data.texts[row], None, f"{curve.points[1 + at].tokens} tokens of filler after the text"


def _poison(result: Any, entry: ReportEntry) -> Iterator[tuple[str, str | None, str]]:
    data, own = _examples(entry, result), result.victims[0]
    found, same = own.attack("found"), [each for each in own.attacks if each.name == "log-odds"]
    kept = same[0].right > 0.5 if same else np.ones(len(result.rows), dtype=bool)  # Else its words say the answer.
    changed = own.right & ~found.right.astype(bool) & kept
    for row, broken in zip(result.rows, changed) if data is not None else ():
        if broken:
            text = data.texts[row]  # type: ignore[union-attr]
            yield text, f"{text} {found.trigger}", f"the trigger “{found.trigger}”"


def _prompts(result: Any, entry: ReportEntry) -> Iterator[tuple[str, str | None, str]]:
    data = _examples(entry, result)
    for row, at in _first_wrong(result.right[:, 0]) if data is not None else ():
        attack = result.attacks[at]
        yield data.texts[row], None, f"the prompt “{attack.prompts[0].prompt}” of {attack.name}"  # type: ignore[union-attr]


_FINDERS: Mapping[str, Callable[[Any, ReportEntry], Iterator[tuple[str, str | None, str]]]] = {
    "words": _words,
    "noise": _noise,
    "position": _position,
    "insertion": _insertion,
    "overflow": _overflow,
    "poison": _poison,
    "prompts": _prompts,
}


def _first_wrong(right: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the examples that are right when clean, `right[0]`, and wrong under an attack, each with the first one."""
    wrong = (right[0] == 1) & (right[1:] == 0)
    for row in np.flatnonzero(wrong.any(0)).tolist():
        yield row, int(wrong[:, row].argmax())


def _examples(entry: ReportEntry, result: Any) -> TextData | None:
    """Return the texts of an entry, read again; None if they cannot be read or are others than those of the result."""
    options = entry.options
    try:
        found = _loaded(str(options.get("data")), options.get("split"), options.get("limit"), options.get("seed"))
    except (InputError, OSError):
        return None
    return found if found.fingerprint == result.provenance["data"]["fingerprint"] else None


@lru_cache(maxsize=16)
def _loaded(data: str, split: str | None, limit: int | None, seed: int) -> TextData:
    from ssmscope.data.text import load_text

    found = load_text(data, split)
    return found if limit is None else found.sample(limit, seed=seed)


# ---- analyses of the hardest examples


def follow_up(plan: Plan, report: Report) -> Plan | None:
    """Return a plan that explains the hardest examples on every model, and patches between a text and its attacked
    version where both have as many tokens; None if there are none."""
    from ssmscope.api.analyses import analysis_of

    found = hardest(report, plan.hardest)
    broken = {
        model.name: [one for each in found for one in each.broken if one.model == model.name] for model in plan.models
    }
    explainable = analysis_of("explain").models
    calls: list[PlannedCall] = []
    for model in plan.models:
        texts = list(dict.fromkeys(one.text for one in broken[model.name]))
        if texts and report.provenance["models"][model.name]["kind"] in explainable:
            calls.append(_planned(model, EXPLAINED, "explain", {"text": texts}))
    for model in plan.models:
        for one in _patchable(model, broken[model.name]):
            calls.append(_planned(model, PATCHED, "patch", {"clean": one.text, "corrupted": one.attacked}))
    return replace(plan, calls=tuple(calls)) if calls else None


def _planned(model: PlannedModel, heading: str, verb: str, options: Mapping[str, Any]) -> PlannedCall:
    from ssmscope.reports.plan import PlannedCall

    loading = {name: getattr(model, name) for name in LOADING_OPTIONS}
    return PlannedCall(
        heading, heading, (model,), None, Call.of(verb, [model.model], options, **loading), model.resources
    )


def _patchable(planned: PlannedModel, broken: Sequence[Broken]) -> list[Broken]:
    """Return the first texts, each once, whose attacked version has as many tokens and other ones."""
    from ssmscope.architectures.loading.load import load
    from ssmscope.core.tokenizing import tokenize

    if not any(one.attacked for one in broken):
        return []
    model: Model = load(planned.model, tokenizer=planned.tokenizer, device="cpu")
    found: dict[str, Broken] = {}
    for one in broken:
        if one.attacked is None or one.text in found:
            continue
        before, after = tokenize(model.tokenizer, [one.text, one.attacked])["input_ids"]
        if len(before) == len(after) and before != after:
            found[one.text] = one
    return list(found.values())[:MAX_PATCHED]
