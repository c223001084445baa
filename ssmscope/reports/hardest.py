"""Examples of a report that attacks break: the hardest ones, the worst findings, and what is asked about them next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ssmscope.api.analysis import LOADING_OPTIONS, Call
from ssmscope.api.scores import Score, data_fingerprint
from ssmscope.core.ties import descending
from ssmscope.errors import InputError
from ssmscope.reports.intervals import interval
from ssmscope.reports.store import Report, ReportEntry

if TYPE_CHECKING:
    from ssmscope.api.results import Result
    from ssmscope.core.model import Model
    from ssmscope.data.text import TextData
    from ssmscope.reports.plan import Plan, PlannedCall, PlannedModel

EXPLAINED, PATCHED = "The hardest examples: what their answers rest on", "The hardest examples: where the attack enters"
"""Headings of the analyses of the hardest examples."""
MAX_PATCHED = 3
"""Maximum number of texts that are patched on each model."""
WORST = 3
"""Number of worst findings."""


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
        if len(entry.models) == 1:
            for one in result.changed_answers(partial(_texts, entry, result)):
                yield Broken(entry.models[0], entry, *one)


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
            for one in result.card_scores(entry.models):
                low = interval(one).low
                if not one.harm or math.isnan(low):
                    continue
                if entry.heading not in most or low > most[entry.heading][0]:
                    most[entry.heading] = low, one, entry
    surely = [found for found in most.values() if found[0] > 0]
    order = [surely[at] for at in descending(np.array([low for low, *_ in surely]))[:WORST]]
    return tuple(Finding(score, entry, next(broken_by(entry), None)) for _, score, entry in order)


def _texts(entry: ReportEntry, result: Result) -> Sequence[str]:
    """Return the texts of an entry, read again; none if they cannot be read or are others than those of the result."""
    options = entry.options
    try:
        names = ("split", "limit", "seed")
        columns = tuple(options.get("columns") or ()) or None
        found = _loaded(str(options.get("data")), *(options.get(name) for name in names), columns)
    except (InputError, OSError):
        return ()
    return found.texts if found.fingerprint == data_fingerprint(result) else ()


@lru_cache(maxsize=16)
def _loaded(data: str, split: str | None, limit: int | None, seed: int, columns: Any) -> TextData:
    from ssmscope.data.text import load_text

    found = load_text(data, split, columns=columns)
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
    from ssmscope.core.tokenizing import tokenize
    from ssmscope.loading.load import load

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
