"""Blocks as HTML: fragments with the stylesheet, and whole pages. Every text in them is escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ssmscope.render import token_rows
from ssmscope.render.blocks import Block, Custom, Picture, Prose, TokenRows
from ssmscope.render.colours import template_text
from ssmscope.render.pictures import dark_data_uri, data_uri
from ssmscope.render.table import Table
from ssmscope.render.tokens import visible


def fragment(blocks: Iterable[Block]) -> str:
    """Return blocks in one element with their styles and scripts, for a notebook or a page.

    Titles are left out, and tables are cut to their brief form.
    """
    shown = [block.head(block.brief) if isinstance(block, Table) else block for block in blocks]
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
            return template("table.html").module.definition(visible(block.text))
        tag = {"heading": f"h{level}", "text": "p", "note": 'p class="note"'}[block.kind]
        return Markup(f"<{tag}>{escape(visible(block.text))}</{tag.partition(' ')[0]}>")
    if isinstance(block, Picture):
        image = image_html(block)
        return Markup("<details><summary>As a picture</summary>{}</details>").format(image) if block.folded else image
    if isinstance(block, Table):
        return grid(block)
    if isinstance(block, TokenRows):
        return token_rows.html(block)
    return Markup(block.html()) if block.html is not None else Markup("")


def image_html(picture: Picture) -> Markup:
    figure = picture.draw()
    source = Markup(data_uri(figure, vector=picture.vector))
    kind = "figure photo" if picture.photo else "figure"
    image = Markup('<img class="{}" alt="{}" src="{}">').format(kind, visible(picture.alt), source)
    if not picture.photo:
        return image
    dark = '<picture><source media="screen and (prefers-color-scheme: dark)" srcset="{}">{}</picture>'
    return Markup(dark).format(Markup(dark_data_uri(figure)), image)


def grid(table: Table, caption: str = "") -> Markup:
    """Return a table with numbers aligned right and its remarks below; screen readers read the caption."""
    return Markup(template("table.html").module.grid(table, caption or table.title or "Table"))


def folded_away(summary: str, table: Callable[[], Table]) -> Custom:
    """Return a table that pages show on demand."""
    return Custom(html=lambda: f"<details><summary>{summary}</summary>{grid(table())}</details>")


def page(title: str, body: str, provenance: Iterable[tuple[str, str]]) -> str:
    """Return a self-contained page in light and dark, which fetches nothing and runs only scripts of its views."""
    shown = dict(title=title, body=Markup(body), provenance=list(provenance), style=Markup(stylesheet()))
    return template("page.html").render(**shown)


def stylesheet() -> str:
    """Return the rules that all views share."""
    return template_text("style.css")


@lru_cache
def template(name: str) -> Any:
    """Return a template, with autoescape on whatever the suffix of its name."""
    loader = PackageLoader("ssmscope.render")
    options: Mapping[str, Any] = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True}
    return Environment(loader=loader, **options).get_template(name)
