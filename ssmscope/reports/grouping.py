"""How a report is divided: entries of one analysis together, what tells those of a group apart, and what their results
say of each model in a line and beside one another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ssmscope.api.results import Result
from ssmscope.render.table import Table
from ssmscope.render.tokens import shorten, visible
from ssmscope.reports.record import Entry, Report

VALUE = 40
"""As many characters as an option's value has in a label."""
LONGEST = 50
"""As many characters as a name for anchors and files has; no file system takes more than 255 bytes."""
VERDICT = 240
"""As many characters as a verdict has."""


@dataclass(frozen=True)
class Group:
    """The entries of one analysis: all with the same heading and verb."""

    name: str
    """Its anchor in the page, and its files' name: letters, digits and hyphens, unique within the report."""
    heading: str
    verb: str
    entries: tuple[Entry, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """What each entry is called: its models, and the options in which the group's entries differ."""
        names = dict.fromkeys(name for entry in self.entries for name in entry.options)
        differing = [name for name in names if len({_written(entry.options.get(name)) for entry in self.entries}) > 1]
        labels = []
        for entry in self.entries:
            parts = [f"{name} {_written(entry.options[name])}" for name in differing if name in entry.options]
            labels.append(" · ".join([", ".join(entry.models) or "no model", *parts]))
        return tuple(labels)

    def found(self) -> Iterator[Found]:
        """Every result of the group, entry by entry."""
        for entry, label in zip(self.entries, self.labels):
            for result in entry.results:
                yield Found(label, entry, result)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its results, in their order."""
        return tuple(dict.fromkeys(result.kind for entry in self.entries for result in entry.results))


@dataclass(frozen=True)
class Found:
    """A result, the entry that it is of, and what that is called."""

    label: str
    entry: Entry
    result: Result


def groups(report: Report) -> tuple[Group, ...]:
    """The report's analyses in the order of the plan."""
    together: dict[tuple[str, str], list[Entry]] = {}
    for entry in report.entries:
        together.setdefault((entry.heading, entry.verb), []).append(entry)
    names = unique([heading for heading, _ in together])
    return tuple(
        Group(name, heading, verb, tuple(entries)) for name, ((heading, verb), entries) in zip(names, together.items())
    )


def models(report: Report) -> tuple[str, ...]:
    """Every model of the report, in the order in which they come."""
    return tuple(dict.fromkeys(name for entry in report.entries for name in entry.models))


def verdict(found: Found, model: str) -> str:
    """What the result says of one of its entry's models, by its shown name."""
    shown = found.entry.models
    return shorten(visible(found.result.verdict(shown.index(model) if model in shown else 0)), VERDICT)


def compared(group: Group, kind: str) -> Table:
    """The group's results of one kind beside one another: models, methods or attacks, the best marked."""
    found = [one for one in group.found() if one.result.kind == kind]
    own = [one.entry.models for one in found]
    labels = [[one.label.replace(", ".join(names), name, 1) for name in names] for one, names in zip(found, own)]
    return found[0].result.compare([one.result for one in found], labels)


def unique(texts: Sequence[str]) -> list[str]:
    """A plain name for each text, for anchors and files: no two alike, not even where case does not count."""
    taken: set[str] = set()
    names = []
    for text in texts:
        plain = re.sub(r"[\W_]+", "-", text.lower()).strip("-")[:LONGEST].strip("-") or "analysis"
        name, number = plain, 1
        while name in taken:
            number += 1
            name = f"{plain}-{number}"
        taken.add(name)
        names.append(name)
    return names


def _written(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return shorten(visible(str(value)), VALUE)
