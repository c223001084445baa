"""Groups of a report's entries by analysis, with labels, verdicts and comparison tables of their results."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ssmscope.api.analyses import analysis_of
from ssmscope.api.results import Result
from ssmscope.render.table import Table
from ssmscope.render.tokens import shorten, visible
from ssmscope.reports.store import Report, ReportEntry

MAX_OPTION_CHARACTERS = 40
"""Maximum length of an option's value in a label."""
MAX_NAME_CHARACTERS = 50
"""Maximum length of a name for anchors and files; file systems allow 255 bytes."""
MAX_VERDICT_CHARACTERS = 240
"""Maximum length of a verdict."""
MAX_MODELS_TOLD = 3
"""Number of models whose findings are said first."""


@dataclass(frozen=True)
class Group:
    """Entries of one analysis, all with the same heading and verb. `name` is that of its anchor in the page and of its
    files: letters, digits and hyphens, unique within the report."""

    name: str
    heading: str
    verb: str
    entries: tuple[ReportEntry, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """Label of each entry: its models, and the options in which the group's entries differ."""
        names = dict.fromkeys(name for entry in self.entries for name in entry.options)
        differing = [name for name in names if len({_written(entry.options.get(name)) for entry in self.entries}) > 1]
        labels = []
        for entry in self.entries:
            parts = [f"{name} {_written(entry.options[name])}" for name in differing if name in entry.options]
            labels.append(" · ".join([", ".join(entry.models) or "no model", *parts]))
        return tuple(labels)

    def results(self) -> Iterator[LabelledResult]:
        """Yield every result of the group, entry by entry."""
        for entry, label in zip(self.entries, self.labels):
            for result in entry.results:
                yield LabelledResult(label, entry, result)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of its results, in order."""
        return tuple(dict.fromkeys(result.kind for entry in self.entries for result in entry.results))


class LabelledResult(NamedTuple):
    """A result, its entry, and the entry's label."""

    label: str
    entry: ReportEntry
    result: Result


def groups(report: Report) -> tuple[Group, ...]:
    """Group the report's entries by heading and verb, in the order of the plan."""
    together: dict[tuple[str, str], list[ReportEntry]] = {}
    for entry in report.entries:
        together.setdefault((entry.heading, entry.verb), []).append(entry)
    names = unique_names([heading for heading, _ in together])
    return tuple(
        Group(name, heading, verb, tuple(entries)) for name, ((heading, verb), entries) in zip(names, together.items())
    )


def model_names(report: Report) -> tuple[str, ...]:
    """Return the names of the report's models, in order of appearance."""
    return tuple(dict.fromkeys(name for entry in report.entries for name in entry.models))


def verdict(found: LabelledResult, model: str) -> str:
    """Return the result's verdict on one of its entry's models, given by its shown name."""
    shown = found.entry.models
    return shorten(visible(found.result.verdict(shown.index(model) if model in shown else 0)), MAX_VERDICT_CHARACTERS)


def findings(report: Report) -> list[str]:
    """Return what a report found about its first models: of each room one verdict, of the analysis to try first, or
    else the plan's first with a row on the scorecard."""
    told = []
    for model in model_names(report)[:MAX_MODELS_TOLD]:
        best: dict[str, tuple[tuple[float, bool], LabelledResult]] = {}
        for group, of in ((group, analysis_of(group.verb)) for group in groups(report)):
            rank = of.first or math.inf, not of.dimensions
            for one in [one for one in group.results() if model in one.entry.models][:1]:
                room = of.module.rpartition(".")[0]
                best[room] = min(best.get(room, (rank, one)), (rank, one), key=lambda each: each[0])
        told += [f"{one.entry.heading}: {model}: {verdict(one, model)}" for _, one in best.values()]
    return told


def comparison(group: Group, kind: str) -> Table:
    """Compare the group's results of one kind in a table of models, methods or attacks, the best marked."""
    found = [one for one in group.results() if one.result.kind == kind]
    own = [one.entry.models for one in found]
    labels = [[one.label.replace(", ".join(names), name, 1) for name in names] for one, names in zip(found, own)]
    return found[0].result.compare([one.result for one in found], labels)


def unique_names(texts: Sequence[str]) -> list[str]:
    """Return a plain name for each text, for anchors and files, unique even on case-insensitive file systems."""
    names: dict[str, None] = {}
    for text in texts:
        plain = re.sub(r"[\W_]+", "-", text.lower()).strip("-")[:MAX_NAME_CHARACTERS].strip("-") or "analysis"
        numbered = (f"{plain}-{number}" for number in itertools.count(2))
        names[next(name for name in itertools.chain([plain], numbered) if name not in names)] = None
    return list(names)


def _written(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return shorten(visible(str(value)), MAX_OPTION_CHARACTERS)
