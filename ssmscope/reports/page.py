"""A report as one HTML file: self-contained, interactive, and readable without scripts, in the dark and on paper.

Nothing is fetched: the page's own policy forbids it, and lets no script run but those that are named by their hash.
Every text of a plan, a model or a data set stands in the page escaped; numbers for scripts are in JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ssmscope.interp.views import attention_page
from ssmscope.interp.views.signed import SIGNED, SIGNED_ON_DARK, STEPS
from ssmscope.interp.views.signed import shades as signed_shades
from ssmscope.interp.views.tokens import BLUES, BLUES_ON_DARK, SHADES, ink, ramp
from ssmscope.reports.compared import compared
from ssmscope.reports.grouping import Found, Group, groups, models
from ssmscope.reports.page_heatmap import Attended, model_of, packed
from ssmscope.reports.page_items import Item, flat, items, took
from ssmscope.reports.record import DONE, FAILED, MISSING, Report
from ssmscope.reports.tables import Table
from ssmscope.reports.verdicts import verdict

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
    scripts = [_file("report.js"), *attention_scripts(listed)]
    page = _template("report.html").render(
        report=report,
        counts=_counts(report),
        failures=[(one, item) for one in sections for item in one.items if item.entry.state == FAILED],
        summary=_summary(report, sections),
        sections=sections,
        provenance=flat(report.provenance, most=LONG),
        script=Markup(scripts[0]),
        style=Markup(_style()),
        shades=_island({"shades": SHADES, "steps": STEPS}),
        policy=_policy(scripts),
    )
    # A lone surrogate, which some tokenizers give, is no character that a file can hold.
    return page.encode(errors="backslashreplace").decode()


def _section(group: Group, own: tuple[Item, ...], links: Mapping[Any, Sequence[Attended]]) -> Section:
    heatmaps = [found for found in group.found() if _of_texts(found)]
    data = packed(heatmaps, links)
    return Section(
        group=group,
        items=own,
        tables=tuple(compared(group, kind) for kind in group.kinds),
        heatmaps=tuple(_island(each) for each in data if each["texts"]),
        left_out=sum(each["every"] - len(each["texts"]) for each in data),
    )


def _of_texts(found: Found) -> bool:
    result: Any = found.result
    return found.result.kind == "heatmap" and not result.of_images


def _links(parts: Iterable[Group], listed: Iterable[tuple[Item, ...]]) -> Mapping[Any, Sequence[Attended]]:
    """Where the attention of each model and text is in the page."""
    links: dict[Any, list[Attended]] = {}
    for group, own in zip(parts, listed):
        for item in own:
            for result, view in zip(item.entry.results, item.views):
                if not view.key:
                    continue
                attention: Any = result
                for number, text in enumerate(attention):
                    where = Attended(view.key, number, f"{group.heading}: {attention.level_name}")
                    links.setdefault((model_of(result), text.tokens), []).append(where)
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
    if item.entry.state == FAILED:
        return [Said(item.anchor, FAILED, item.error)]
    if item.entry.state == MISSING:
        return [Said(item.anchor, MISSING, "not run yet")]
    found = [Found(item.label, item.entry, result) for result in item.entry.results]
    before = item.label.removeprefix(", ".join(item.entry.models)).strip(" ·")
    lines = [verdict(one, model) for one in found] or ["done, without a result"]
    return [Said(item.anchor, DONE, f"{before}: {line}" if before else line) for line in lines]


def _counts(report: Report) -> str:
    """How many entries are in which state, and what they took."""
    names = {DONE: "done", FAILED: "failed", MISSING: "not run yet"}
    numbers = {name: sum(entry.state == state for entry in report.entries) for state, name in names.items()}
    seconds = sum(entry.seconds or 0.0 for entry in report.entries)
    listed = ", ".join(f"{number} {name}" for name, number in numbers.items() if number)
    return f"{len(report.entries)} entries: {listed or 'none'}; {took(seconds)} of computing"


def attention_scripts(listed: Iterable[tuple[Item, ...]]) -> list[str]:
    """The scripts that the attention maps of the page bring with them."""
    keys = dict.fromkeys(view.key for own in listed for item in own for view in item.views if view.key)
    return [attention_page._SCRIPT.replace("KEY", key) for key in keys]


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


def _template(name: str) -> Any:
    loader = PackageLoader("ssmscope.reports")
    # Autoescape for every template, whatever its name ends with.
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True).get_template(name)


def _file(name: str) -> str:
    return resources.files("ssmscope.reports").joinpath("templates", name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _style() -> str:
    light = _shade_rules(BLUES, SIGNED)
    dark = _shade_rules(BLUES_ON_DARK, SIGNED_ON_DARK)
    return _file("report.css").replace("/* LIGHT */", light).replace("/* DARK */", dark)


def _shade_rules(stops: tuple[str, ...], signed: tuple[str, ...]) -> str:
    rules = [f".heat .v{i} {{ background: {c}; color: {ink(c)} }}" for i, c in enumerate(ramp(stops))]
    colours = enumerate(signed_shades(signed), start=-STEPS)
    rules += [f'.heat [data-l="{i}"] {{ background: {c}; color: {ink(c)} }}' for i, c in colours]
    for name, ends in (("upward", stops), ("around", signed)):
        rules.append(f".heat .{name} i {{ background: linear-gradient(90deg, {', '.join(ends)}) }}")
    return "\n".join(rules)
