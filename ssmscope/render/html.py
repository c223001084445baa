"""Blocks as HTML: fragments with the stylesheet, and whole pages. Every text in them is escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from ssmscope.render import token_rows
from ssmscope.render.blocks import Block, Custom, Picture, Prose, TokenRows
from ssmscope.render.colours import template_text
from ssmscope.render.pictures import dark_data_uri, data_uri
from ssmscope.render.table import Table
from ssmscope.render.tokens import unbroken, visible

POINTS_PER_INCH = 96
"""Points of CSS in an inch of a figure."""
MIN_SCALE, MAX_LEAST_WIDTH = 0.9, 960
"""Smallest scale of a figure, and points that even the widest may shrink to."""


def fragment(blocks: Iterable[Block]) -> str:
    """Return blocks in one element with their styles and scripts, for a notebook or a page.

    Titles are left out, and tables are cut to their brief form.
    """
    shown: list[Block] = []
    for block in blocks:
        last = shown[-1] if shown else None
        if isinstance(last, Table) and last.note and isinstance(block, Prose) and block.kind == "definition":
            shown[-1] = replace(last, note=f"{last.note} {block.text}")
        else:
            shown.append(block.head(block.brief) if isinstance(block, Table) else block)
    inner = Markup("\n").join(filter(None, map(block_html, shown)))
    styles = f"<style>{stylesheet()}{''.join(styles_of(shown))}</style>"
    scripts = "".join(f"<script>{script}</script>" for script in scripts_of(shown))
    return f'<div class="ssmscope">{styles}{inner}{scripts}</div>'


def styles_of(blocks: Iterable[Block]) -> list[str]:
    """Return the rules that blocks add to the stylesheet, each once."""
    rules = [token_rows.style() if isinstance(block, TokenRows) else getattr(block, "style", "") for block in blocks]
    return list(dict.fromkeys(f"{each}\n" for each in rules if each))


def scripts_of(blocks: Iterable[Block]) -> list[str]:
    return list(dict.fromkeys(block.script for block in blocks if isinstance(block, Custom) and block.script))


def block_html(block: Block, *, level: int = 2) -> Markup:
    """Return a block as HTML, with headings of this level."""
    if isinstance(block, Prose):
        if block.kind == "title":
            return Markup("")
        if block.kind == "definition":
            return template("table.html").module.definition(unbroken(visible(block.text)))
        tag = {"heading": f"h{level}", "text": "p", "note": 'p class="note"'}[block.kind]
        return Markup(f"<{tag}>{escape(unbroken(visible(block.text)))}</{tag.partition(' ')[0]}>")
    if isinstance(block, Picture):
        image = image_html(block)
        return folded("As a picture", image) if block.folded else image
    if isinstance(block, Table):
        return grid(block)
    if isinstance(block, TokenRows):
        return token_rows.html(block)
    return Markup(block.html()) if block.html is not None else Markup("")


def image_html(picture: Picture) -> Markup:
    """Return a picture with a least width, at which its letters can be read, in an element that scrolls."""
    figure = picture.draw()
    source = Markup(data_uri(figure, vector=picture.vector))
    kind, width = "figure photo" if picture.photo else "figure", figure.get_figwidth() * POINTS_PER_INCH
    image = Markup('<img class="{}" width="{:.0f}" style="min-width: {:.0f}px" alt="{}" src="{}">')
    image = image.format(kind, width, min(MIN_SCALE * width, MAX_LEAST_WIDTH), visible(picture.alt), source)
    if picture.photo:
        dark = '<picture><source media="screen and (prefers-color-scheme: dark)" srcset="{}">{}</picture>'
        image = Markup(dark).format(Markup(dark_data_uri(figure)), image)
    return Markup('<div class="wide" tabindex="0" role="group" aria-label="Picture">{}</div>').format(image)


def grid(table: Table, caption: str = "") -> Markup:
    """Return a table with numbers aligned right and its remarks below; screen readers read the caption."""
    return Markup(template("table.html").module.grid(table, caption or table.title or "Table"))


def folded_away(summary: str, table: Callable[[], Table]) -> Custom:
    """Return a table that pages show on demand."""
    return Custom(html=lambda: str(folded(summary, grid(table()))))


def folded(summary: str, content: Markup) -> Markup:
    return Markup('<details class="folded"><summary>{}</summary>{}</details>').format(summary, content)


def page(title: str, body: str, provenance: Iterable[tuple[str, str]]) -> str:
    """Return a self-contained page in light and dark, which fetches nothing and runs only scripts of its views."""
    shown = dict(title=unbroken(title), body=Markup(body), provenance=list(provenance), style=Markup(stylesheet()))
    return template("page.html").render(**shown)


def stylesheet() -> str:
    """Return the rules that all views share."""
    return template_text("style.css")


@lru_cache
def template(name: str) -> Any:
    """Return a template, with autoescape on whatever the suffix of its name."""
    loader = PackageLoader("ssmscope.render")
    options: Mapping[str, Any] = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True}
    environment = Environment(loader=loader, **options)
    environment.filters["unbroken"] = unbroken
    return environment.get_template(name)
