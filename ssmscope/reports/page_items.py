"""The entries of a page: what each shows of its results, and where its numbers come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup

from ssmscope.api.results import REPORT_ROWS, Result
from ssmscope.render.blocks import Block, Custom, Picture, TokenRows
from ssmscope.render.html import block_html, grid, image_html
from ssmscope.render.table import Table
from ssmscope.render.tokens import shorten, visible
from ssmscope.reports.grouping import Group
from ssmscope.reports.record import Entry

OPEN_ROWS = 12
"""Up to how many rows a table is shown without being asked for."""
VALUE = 300
"""As many characters as an option or an error has where all are listed."""


@dataclass(frozen=True)
class Part:
    """A block as the page has it."""

    block: Block
    anchor: str
    """The id of a view of its own, where scripts of the page look for it."""
    html: Markup
    """Empty where the page shows the block elsewhere, or has a title of its own."""
    summary: str = ""
    """What it is folded away behind; empty where it is not."""
    opened: bool = False
    on_request: bool = False
    """Whether it is put into the page when it is asked for."""


@dataclass(frozen=True)
class View:
    """What is shown of one result."""

    headline: str
    parts: tuple[Part, ...]


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
    made = []
    for number, (entry, label) in enumerate(zip(group.entries, group.labels), start=1):
        anchor = f"{group.name}--{number}"
        views = tuple(_view(result, f"{anchor}--{at}") for at, result in enumerate(entry.results, start=1))
        made.append(Item(anchor, label, entry, views, tuple(_origin(entry))))
    return tuple(made)


def _view(result: Result, anchor: str) -> View:
    headline = visible(result.headline)
    blocks = tuple(result.blocks())
    # The view to point at has one method at a time, the picture has them below one another.
    methods = any(isinstance(block, TokenRows) and block.of == "method" for block in blocks)
    places = (f"{anchor}-{number}" for number in range(1, len(blocks) + 1))
    return View(headline, tuple(_part(*each, headline, drawn=methods) for each in zip(blocks, places)))


def _part(block: Block, anchor: str, headline: str, *, drawn: bool) -> Part:
    """A block as the page has it.

    Args:
        drawn: whether a picture that a result folds away is shown all the same.
    """
    if isinstance(block, TokenRows):
        return Part(block, anchor, Markup(""))
    if isinstance(block, Table):
        shown = replace(block.head(REPORT_ROWS), title="")
        summary = f"{visible(block.title) or 'Table'}: {len(shown.rows)} rows"
        return Part(block, anchor, grid(shown, block.title or headline), summary, len(shown.rows) <= OPEN_ROWS)
    if isinstance(block, Picture):
        return Part(block, anchor, image_html(block), "As a picture" if block.folded else "", drawn)
    if isinstance(block, Custom):
        inner = block_html(block)
        own = Markup('<div class="part" id="{}">{}</div>').format(anchor, inner) if inner else inner
        return Part(block, anchor, own, "Token by token" * block.on_request, on_request=block.on_request)
    return Part(block, anchor, block_html(block, level=4))


def _origin(entry: Entry) -> list[tuple[str, str]]:
    rows = [("key", entry.key)]
    rows += [] if entry.seconds is None else [("took", took(entry.seconds))]
    rows += [(f"option {name}", value) for name, value in flat(entry.options)]
    for result in entry.results:
        of = f"{result.kind} " if len(entry.results) > 1 else ""
        rows += [(f"{of}{name}", value) for name, value in flat(result.provenance)]
        rows += [(f"{of}queries", result.queries_made)] if result.queries_made else []
    return rows


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
