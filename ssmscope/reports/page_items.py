"""The entries of a page: what each shows of its results, and where its numbers come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from ssmscope.interp.views.tokens import shorten, visible
from ssmscope.reports.grouping import Found, Group
from ssmscope.reports.pictures import data_uri
from ssmscope.reports.record import Entry
from ssmscope.reports.tables import Table, folded
from ssmscope.results import Result

TABLE_ROWS = 100
"""How many rows of a result's table the page has; the files hold all."""
OPEN_ROWS = 12
"""Up to how many rows a table is shown without being asked for."""
VALUE = 300
"""As many characters as an option or an error has where all are listed."""

WHOLE = frozenset({"attention", "effect", "prompts", "snr", "words"})
"""Kinds whose own HTML view holds figure and table."""
ON_REQUEST = frozenset({"explain", "trajectory"})
"""Kinds whose own HTML view is a text of many tokens: put into the page when it is asked for."""
RASTER = frozenset({"explain", "heatmap", "trajectory"})
"""Kinds whose figure has a mark for every token."""


@dataclass(frozen=True)
class View:
    """What is shown of one result."""

    headline: str
    picture: str = ""
    """A data URI."""
    folded_away: bool = False
    """Whether the picture is shown when it is asked for."""
    table: Table | None = None
    markup: Markup = Markup("")
    """The result's own view."""
    on_request: bool = False
    """Whether that is put into the page when it is asked for."""
    key: str = ""
    """Of attention maps: what their script finds them by."""

    @property
    def table_open(self) -> bool:
        return self.table is not None and len(self.table.rows) <= OPEN_ROWS


@dataclass(frozen=True)
class Item:
    """One entry of the report."""

    anchor: str
    label: str
    entry: Entry
    views: tuple[View, ...]
    origin: tuple[tuple[str, str], ...]
    """What is to be known of where the numbers come from, by name."""

    @property
    def error(self) -> str:
        """The error in one line of bearable length."""
        return shortened(" ".join((self.entry.error or "no reason was recorded").split()))

    @property
    def took(self) -> str:
        return "" if self.entry.seconds is None else took(self.entry.seconds)


def items(group: Group) -> tuple[Item, ...]:
    """The group's entries, as the page shows them."""
    return tuple(
        Item(
            anchor=f"{group.name}--{number}",
            label=label,
            entry=entry,
            views=tuple(_view(Found(label, entry, result)) for result in entry.results),
            origin=tuple(_origin(entry)),
        )
        for number, (entry, label) in enumerate(zip(group.entries, group.labels), start=1)
    )


def _view(found: Found) -> View:
    result: Any = found.result
    kind, headline = result.kind, visible(result.headline)
    if kind in WHOLE:
        markup = _own(result)
        key = re.search(r'data-key="([0-9a-f]{16})"', markup) if kind == "attention" else None
        return View(headline, markup=markup, key=key[1] if key else "")
    picture = data_uri(result.figure(), vector=kind not in RASTER)
    if kind == "heatmap":
        return View(headline, picture, folded_away=not result.of_images)
    if kind in ON_REQUEST and not getattr(result, "of_images", False):
        return View(headline, picture, markup=_own(result), on_request=True)
    return View(headline, picture, table=folded(result.to_frame(), limit=TABLE_ROWS))


def _own(result: Result) -> Markup:
    """The result's own HTML view, its headings below those of an entry."""
    return Markup(result._repr_html_().replace("<h2>", "<h4>").replace("</h2>", "</h4>"))


def _origin(entry: Entry) -> list[tuple[str, str]]:
    rows = [("key", entry.key)]
    rows += [] if entry.seconds is None else [("took", took(entry.seconds))]
    rows += [(f"option {name}", value) for name, value in flat(entry.options)]
    for result in entry.results:
        of = f"{result.kind} " if len(entry.results) > 1 else ""
        rows += [(f"{of}{name}", value) for name, value in flat(result.provenance)]
        asked = queries(result)
        rows += [(f"{of}queries", asked)] if asked else []
    return rows


def queries(result: Any) -> str:
    """How often the model was asked, where a result counts that."""
    if result.kind == "prompts":
        return f"{result.cost.asked:,} filled prompts, of which {result.cost.run:,} were run"
    if result.kind == "words":
        gradients = sum(each.gradients for each in result.examples)
        return f"{sum(each.queries for each in result.examples):,} texts and {gradients:,} gradients"
    return ""


def took(seconds: float) -> str:
    """A duration in words."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def shortened(text: str, most: int = VALUE) -> str:
    """The text cut to `most` characters, with how many it has."""
    return text if len(text) <= most else f"{shorten(text, most)} ({len(text):,} characters)"


def flat(value: Any, prefix: str = "", most: int = VALUE) -> list[tuple[str, str]]:
    """Nested mappings as names and values: {"a": {"b": 1}} is ("a b", "1"). Long values are cut to `most`."""
    if isinstance(value, Mapping):
        return [row for key, item in value.items() for row in flat(item, f"{prefix} {key}".strip(), most)]
    return [(prefix, shortened(_said(value), most))]


def _said(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple | np.ndarray):
        return ", ".join(map(_said, value)) or "none"
    return str(value)
