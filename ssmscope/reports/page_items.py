"""Entries of a page: the parts shown of each result, and the provenance of its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from ssmscope.api.results import REPORT_ROWS, Result
from ssmscope.render.blocks import Block, Custom, Picture, TokenRows
from ssmscope.render.html import block_html, grid, image_html
from ssmscope.render.table import Table
from ssmscope.render.tokens import shorten, visible
from ssmscope.reports.grouping import Group
from ssmscope.reports.store import Entry

MAX_OPEN_ROWS = 12
"""Maximum number of rows of a table that is unfolded at first."""
MAX_VALUE_CHARACTERS = 300
"""Maximum length of an option or error in a list."""


class Part(NamedTuple):
    """A block as the page shows it.

    Attributes:
        anchor: id, by which scripts of the page find it.
        html: HTML of the block; empty if the page shows it elsewhere.
        summary: title of the fold that hides it; empty if it is not folded.
        on_request: True if it is inserted into the page only when opened.
    """

    block: Block
    anchor: str
    html: Markup
    summary: str = ""
    opened: bool = False
    on_request: bool = False


class View(NamedTuple):
    """Headline and parts shown of one result."""

    headline: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Item:
    """One entry of the report; `origin` is the provenance of its numbers, as names and values."""

    anchor: str
    label: str
    entry: Entry
    views: tuple[View, ...]
    origin: tuple[tuple[str, str], ...]

    @property
    def error(self) -> str:
        """Error in one line, shortened."""
        return shortened(" ".join((self.entry.error or "no reason was recorded").split()))

    @property
    def took(self) -> str:
        return "" if self.entry.seconds is None else duration(self.entry.seconds)


def items(group: Group) -> tuple[Item, ...]:
    """Return the group's entries as the page shows them."""
    made = []
    for number, (entry, label) in enumerate(zip(group.entries, group.labels), start=1):
        views = (_view(result, f"{group.name}--{number}--{at}") for at, result in enumerate(entry.results, start=1))
        made.append(Item(f"{group.name}--{number}", label, entry, tuple(views), tuple(_origin(entry))))
    return tuple(made)


def _view(result: Result, anchor: str) -> View:
    headline = visible(result.headline)
    blocks = tuple(result.blocks())
    # The interactive heatmap shows one method at a time, the picture shows all.
    methods = any(isinstance(block, TokenRows) and block.of == "method" for block in blocks)
    places = (f"{anchor}-{number}" for number in range(1, len(blocks) + 1))
    return View(headline, tuple(_part(*each, headline, drawn=methods) for each in zip(blocks, places)))


def _part(block: Block, anchor: str, headline: str, *, drawn: bool) -> Part:
    """Prepare a block for the page; with `drawn`, pictures that a result folds away are unfolded."""
    if isinstance(block, TokenRows):
        return Part(block, anchor, Markup(""))
    if isinstance(block, Table):
        shown = replace(block.head(REPORT_ROWS), title="")
        summary = f"{visible(block.title) or 'Table'}: {len(shown.rows)} rows"
        return Part(block, anchor, grid(shown, block.title or headline), summary, len(shown.rows) <= MAX_OPEN_ROWS)
    if isinstance(block, Picture):
        return Part(block, anchor, image_html(block), "As a picture" if block.folded else "", drawn)
    if isinstance(block, Custom):
        inner = block_html(block)
        own = Markup('<div class="part" id="{}">{}</div>').format(anchor, inner) if inner else inner
        return Part(block, anchor, own, "Token by token" * block.on_request, on_request=block.on_request)
    return Part(block, anchor, block_html(block, level=4))


def _origin(entry: Entry) -> list[tuple[str, str]]:
    rows = [("key", entry.key)]
    rows += [] if entry.seconds is None else [("took", duration(entry.seconds))]
    rows += [(f"option {name}", value) for name, value in flatten(entry.options)]
    for result in entry.results:
        of = f"{result.kind} " if len(entry.results) > 1 else ""
        rows += [(f"{of}{name}", value) for name, value in flatten(result.provenance)]
        rows += [(f"{of}queries", result.queries_made)] if result.queries_made else []
    return rows


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def shortened(text: str, most: int = MAX_VALUE_CHARACTERS) -> str:
    """Cut a text to `most` characters and append its full length."""
    return text if len(text) <= most else f"{shorten(text, most)} ({len(text):,} characters)"


def flatten(value: Any, prefix: str = "", most: int = MAX_VALUE_CHARACTERS) -> list[tuple[str, str]]:
    """Flatten nested mappings to names and values, {"a": {"b": 1}} to ("a b", "1"), each cut to `most` characters."""
    if isinstance(value, Mapping):
        return [row for key, item in value.items() for row in flatten(item, f"{prefix} {key}".strip(), most)]
    return [(prefix, shortened(_formatted(value), most))]


def _formatted(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple | np.ndarray):
        return ", ".join(map(_formatted, value)) or "none"
    return str(value)
