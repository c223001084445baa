"""A report as one HTML file: self-contained, interactive, and readable without scripts, in the dark and on paper.

Nothing is fetched: the page's own policy forbids it, and lets no script run but those that are named by their hash.
Every text of a plan, a model or a data set stands in the page escaped; numbers for scripts are in JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ssmscope.render.blocks import TokenMaps, TokenRows
from ssmscope.render.html import grid, scripts_of, styles_of, stylesheet
from ssmscope.render.signed import STEPS, signed_style
from ssmscope.render.table import Table
from ssmscope.render.tokens import SHADES, shade_style
from ssmscope.reports.grouping import Found, Group, compared, groups, models, verdict
from ssmscope.reports.page_heatmap import Attended, model_of, packed
from ssmscope.reports.page_items import Item, Part, flat, items, took
from ssmscope.reports.record import DONE, FAILED, LEFT_OUT, MISSING, Report

LONG = 100_000
"""As many characters of a value of the report's provenance, such as the plan, as are shown."""


@dataclass(frozen=True)
class Said:
    """A line in a cell of the summary: what an entry says of a model, and where it is."""

    anchor: str
    state: str
    text: str


@dataclass(frozen=True)
class Section:
    """An analysis."""

    group: Group
    items: tuple[Item, ...]
    tables: tuple[Table, ...]
    heatmaps: tuple[Markup, ...]
    """For each heatmap its data as JSON."""
    left_out: int
    """Texts that are not in the interactive heatmaps."""


def render(report: Report) -> str:
    """The page of the report, complete HTML.

    A table of verdicts (models × analyses) with failures in it stands first, then each analysis: its models beside one
    another, heatmaps to point at, each entry's figure, table, command and provenance.
    """
    parts = groups(report)
    listed = [items(group) for group in parts]
    links = _links(parts, listed)
    sections = [_section(group, own, links) for group, own in zip(parts, listed)]
    blocks = [part.block for own in listed for _, part in _parts(own)]
    scripts = [_file("report.js"), *scripts_of(blocks)]
    page = _template("report.html").render(
        report=report,
        grid=grid,
        counts=_counts(report),
        failures=[(one, item) for one in sections for item in one.items if item.entry.state == FAILED],
        summary=_summary(report, sections),
        sections=sections,
        provenance=flat(report.provenance, most=LONG),
        scripts=list(map(Markup, scripts)),
        # What is of the page stands last: where rules are as specific as another's, it decides.
        style=Markup("".join([stylesheet(), shade_style(), signed_style(), *styles_of(blocks), _file("report.css")])),
        shades=_island({"shades": SHADES, "steps": STEPS}),
        policy=_policy(scripts),
    )
    # A lone surrogate, which some tokenizers give, is no character that a file can hold.
    return page.encode(errors="backslashreplace").decode()


def _section(group: Group, own: tuple[Item, ...], links: Mapping[Any, Sequence[Attended]]) -> Section:
    scores = [(found, part.block) for found, part in _parts(own) if isinstance(part.block, TokenRows)]
    data = packed(scores, links)
    return Section(
        group=group,
        items=own,
        tables=tuple(compared(group, kind) for kind in group.kinds),
        heatmaps=tuple(_island(each) for each in data if each["texts"]),
        left_out=sum(each["every"] - len(each["texts"]) for each in data),
    )


def _parts(own: Iterable[Item]) -> Iterator[tuple[Found, Part]]:
    """All that is shown of the results of a group's entries."""
    for item in own:
        for result, view in zip(item.entry.results, item.views):
            for part in view.parts:
                yield Found(item.label, item.entry, result), part


def _links(parts: Iterable[Group], listed: Iterable[tuple[Item, ...]]) -> Mapping[Any, Sequence[Attended]]:
    """Where in the page the attention of each model and text is."""
    links: dict[Any, list[Attended]] = {}
    for group, own in zip(parts, listed):
        for found, part in _parts(own):
            if isinstance(part.block, TokenMaps):
                for number, tokens in enumerate(part.block.tokens):
                    where = Attended(part.anchor, number, f"{group.heading}: {part.block.name}")
                    links.setdefault((model_of(found.result), tokens), []).append(where)
    return links


def _summary(report: Report, sections: Sequence[Section]) -> list[tuple[str, list[list[Said]]]]:
    """For each model and analysis what the entries say."""
    rows = []
    for model in models(report):
        cells = []
        for section in sections:
            said = [line for item in section.items if model in item.entry.models for line in _said(item, model)]
            cells.append(said)
        rows.append((model, cells))
    return rows


def _said(item: Item, model: str) -> list[Said]:
    if item.entry.state in (FAILED, LEFT_OUT):
        return [Said(item.anchor, item.entry.state, item.error)]
    if item.entry.state == MISSING:
        return [Said(item.anchor, MISSING, item.entry.error or "not run yet")]
    found = [Found(item.label, item.entry, result) for result in item.entry.results]
    before = item.label.removeprefix(", ".join(item.entry.models)).strip(" ·")
    lines = [verdict(one, model) for one in found] or ["done, without a result"]
    return [Said(item.anchor, DONE, f"{before}: {line}" if before else line) for line in lines]


def _counts(report: Report) -> str:
    """How many entries are in which state, and what they took."""
    names = {DONE: "done", FAILED: "failed", LEFT_OUT: "left out", MISSING: "not run yet"}
    numbers = {name: sum(entry.state == state for entry in report.entries) for state, name in names.items()}
    seconds = sum(entry.seconds or 0.0 for entry in report.entries)
    listed = ", ".join(f"{number} {name}" for name, number in numbers.items() if number)
    return f"{len(report.entries)} entries: {listed or 'none'}; {took(seconds)} of computing"


def _policy(scripts: Iterable[str]) -> str:
    """A content security policy: nothing from anywhere, and only these scripts."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _island(value: Any) -> Markup:
    """JSON for an element that is no script; a "<" in it could close the element."""
    return Markup(json.dumps(value, allow_nan=False).replace("<", "\\u003c"))


@lru_cache(maxsize=1)
def _template(name: str) -> Any:
    loader = PackageLoader("ssmscope.reports")
    # Autoescape for every template, whatever its name ends with.
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True).get_template(name)


def _file(name: str) -> str:
    return resources.files("ssmscope.reports").joinpath("templates", name).read_text(encoding="utf-8")
