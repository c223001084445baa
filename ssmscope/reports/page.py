"""Report as one self-contained, interactive HTML file, readable without scripts, in dark mode and on paper.

Nothing is fetched: the page's policy forbids it and allows only scripts named by their hash. All texts of plans, models
and data sets are escaped; numbers for scripts are in JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ssmscope.render.blocks import TokenMaps, TokenRows
from ssmscope.render.colours import SHADES, STEPS, shade_style, signed_style
from ssmscope.render.html import grid, scripts_of, styles_of, stylesheet
from ssmscope.render.table import Table
from ssmscope.reports.grouping import Group, LabelledResult, comparison, groups, model_names, verdict
from ssmscope.reports.page_heatmap import AttentionLink, Links, model_of, packed
from ssmscope.reports.page_items import Item, Part, duration, flatten, items
from ssmscope.reports.store import DONE, FAILED, LEFT_OUT, MISSING, Report

MAX_PROVENANCE_CHARACTERS = 100_000
"""Maximum length of a value of the report's provenance, such as the plan."""


class SummaryLine(NamedTuple):
    """Line in a cell of the summary: an entry's verdict on a model, and its anchor."""

    anchor: str
    state: str
    text: str


class Section(NamedTuple):
    """Section of the page with one analysis: its interactive heatmaps as JSON, and how many texts these leave out."""

    group: Group
    items: tuple[Item, ...]
    tables: tuple[Table, ...]
    heatmaps: tuple[Markup, ...]
    left_out: int


def render(report: Report) -> str:
    """Render the report as a complete HTML page.

    It begins with a table of verdicts and failures (models × analyses); then follows each analysis: comparison of its
    models, interactive heatmaps, and each entry's figure, table, command and provenance.
    """
    parts = groups(report)
    listed = [items(group) for group in parts]
    links = _links(parts, listed)
    sections = [_section(group, own, links) for group, own in zip(parts, listed)]
    blocks = [part.block for own in listed for _, part in _parts(own)]
    scripts = [file("report.js"), *scripts_of(blocks)]
    page = template("report.html").render(
        report=report,
        grid=grid,
        counts=_counts(report),
        failures=[(one, item) for one in sections for item in one.items if item.entry.state == FAILED],
        summary=_summary(report, sections),
        sections=sections,
        provenance=flatten(report.provenance, most=MAX_PROVENANCE_CHARACTERS),
        scripts=list(map(Markup, scripts)),
        # The page's own rules come last and so win over equally specific ones.
        style=Markup("".join([stylesheet(), shade_style(), signed_style(), *styles_of(blocks), file("report.css")])),
        shades=_island({"shades": SHADES, "steps": STEPS}),
        policy=policy(scripts),
    )
    # Some tokenizers give lone surrogates, which no file can hold.
    return page.encode(errors="backslashreplace").decode()


def _section(group: Group, own: tuple[Item, ...], links: Links) -> Section:
    scores = [(found, part.block) for found, part in _parts(own) if isinstance(part.block, TokenRows)]
    data = packed(scores, links)
    return Section(
        group=group,
        items=own,
        tables=tuple(comparison(group, kind) for kind in group.kinds),
        heatmaps=tuple(_island(each) for each in data if each["texts"]),
        left_out=sum(each["every"] - len(each["texts"]) for each in data),
    )


def _parts(own: Iterable[Item]) -> Iterator[tuple[LabelledResult, Part]]:
    """Yield all parts shown of the results of a group's entries."""
    for item in own:
        for result, view in zip(item.entry.results, item.views):
            for part in view.parts:
                yield LabelledResult(item.label, item.entry, result), part


def _links(parts: Iterable[Group], listed: Iterable[tuple[Item, ...]]) -> Links:
    """Collect the links to the attention maps of each model and text."""
    links: dict[Any, list[AttentionLink]] = {}
    for group, own in zip(parts, listed):
        for found, part in _parts(own):
            if isinstance(part.block, TokenMaps):
                for number, tokens in enumerate(part.block.tokens):
                    where = AttentionLink(part.anchor, number, f"{group.heading}: {part.block.name}")
                    links.setdefault((model_of(found.result), tokens), []).append(where)
    return links


def _summary(report: Report, sections: Sequence[Section]) -> dict[str, Any]:
    """Return the lines of each model's entries in each section, models in rows or, if they are fewer, in columns."""

    def cell(section: Section, model: str) -> list[SummaryLine]:
        return [line for item in section.items if model in item.entry.models for line in _summary_lines(item, model)]

    models = model_names(report)
    found = [[cell(section, model) for section in sections] for model in models]
    of_models, of_sections = [(name, "") for name in models], [(one.group.heading, one.group.name) for one in sections]
    if len(models) < len(sections):
        return {"corner": "analysis", "heads": of_models, "rows": list(zip(of_sections, zip(*found)))}
    return {"corner": "model", "heads": of_sections, "rows": list(zip(of_models, found))}


def _summary_lines(item: Item, model: str) -> list[SummaryLine]:
    if item.entry.state in (FAILED, LEFT_OUT):
        return [SummaryLine(item.anchor, item.entry.state, item.error)]
    if item.entry.state == MISSING:
        return [SummaryLine(item.anchor, MISSING, item.entry.error or "not run yet")]
    found = [LabelledResult(item.label, item.entry, result) for result in item.entry.results]
    before = item.label.removeprefix(", ".join(item.entry.models)).strip(" ·")
    lines = [verdict(one, model) for one in found] or ["done, without a result"]
    return [SummaryLine(item.anchor, DONE, f"{before}: {line}" if before else line) for line in lines]


def _counts(report: Report) -> str:
    """Summarize the number of entries in each state and their total time."""
    names = {DONE: "done", FAILED: "failed", LEFT_OUT: "left out", MISSING: "not run yet"}
    numbers = {name: sum(entry.state == state for entry in report.entries) for state, name in names.items()}
    seconds = sum(entry.seconds or 0.0 for entry in report.entries)
    listed = ", ".join(f"{number} {name}" for name, number in numbers.items() if number)
    return f"{len(report.entries)} entries: {listed or 'none'}; {duration(seconds)} of computing"


def policy(scripts: Iterable[str]) -> str:
    """Return a content security policy that allows only these scripts and no other resources."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _island(value: Any) -> Markup:
    """Encode a value as JSON for a data element; "<" is escaped because it could close the element."""
    return Markup(json.dumps(value, allow_nan=False).replace("<", "\\u003c"))


@lru_cache
def template(name: str) -> Any:
    """Return a template of this package."""
    loader = PackageLoader("ssmscope.reports")
    # Jinja would choose autoescaping by suffix; here every template escapes.
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True).get_template(name)


def file(name: str) -> str:
    """Return the text of a style or script of this package."""
    return resources.files("ssmscope.reports").joinpath("templates", name).read_text(encoding="utf-8")
