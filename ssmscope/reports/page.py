"""Report as one self-contained, interactive HTML file, readable without scripts, in dark mode and on paper.

Nothing is fetched: the page's policy forbids it and allows only scripts named by their hash. All texts of plans, models
and data sets are escaped; numbers for scripts are in JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from ssmscope.api.results import REPORT_ROWS, Result
from ssmscope.render.blocks import Block, Custom, Picture, TokenMaps, TokenRows, TokenText
from ssmscope.render.colours import SHADES, STEPS, shade_style, signed_style
from ssmscope.render.html import block_html, grid, image_html, scripts_of, styles_of, stylesheet
from ssmscope.render.numbers import format_probability
from ssmscope.render.table import Table
from ssmscope.render.token_rows import row_kinds, scale_ends
from ssmscope.render.tokens import shorten, spell_tokens, unbroken, visible
from ssmscope.reports import audit_page
from ssmscope.reports.gate_files import gates_headline, gates_table
from ssmscope.reports.grouping import Group, LabelledResult, comparison, groups, model_names, verdict
from ssmscope.reports.store import DONE, FAILED, LEFT_OUT, MISSING, Report, ReportEntry

MAX_PROVENANCE_CHARACTERS = 100_000
"""Maximum length of a value of the report's provenance, such as the plan."""
MAX_OPEN_ROWS = 12
"""Maximum number of rows of a table that is unfolded at first."""
MAX_VALUE_CHARACTERS = 300
"""Maximum length of an option or error in a list."""
MAX_TOKENS_PER_TEXT = 1500
"""Number of a text's first tokens on the page; the files have all."""
MAX_TOKEN_CHARACTERS = 120
"""Maximum length of a token as shown."""
MAX_NAME_CHARACTERS = 60
"""Maximum length of a text's name."""
MAX_BYTES = 40_000_000
"""Approximate maximum size of an analysis's heatmaps; the page says how many texts are left out."""

# ---- parts shown of each result


class Part(NamedTuple):
    """A block as the page shows it: the `anchor` by which scripts find it, its `html`, empty if shown elsewhere, and
    the `summary` of the fold that hides it, empty without one; `on_request` it is inserted only when opened."""

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
    entry: ReportEntry
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
    places = (f"{anchor}-{number}" for number in count(1))
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


def _origin(entry: ReportEntry) -> list[tuple[str, str]]:
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


# ---- interactive heatmaps


class AttentionLink(NamedTuple):
    """Location of a text's attention maps: the anchor of their part in the page, the text's index there, a name."""

    anchor: str
    text: int
    label: str


Links = Mapping[tuple[str, tuple[str, ...]], Sequence[AttentionLink]]
"""Links by a model's fingerprint and a text's tokens."""


def packed(every: Sequence[tuple[LabelledResult, TokenRows]], links: Links) -> list[dict[str, Any]]:
    """Return the model, variant and texts of each view of coloured texts as JSON values (`_text` describes a text)."""
    left = MAX_BYTES
    results = []
    for found, block in every:
        texts, shown = [], [text for text in block.texts if text.pixels is None]
        for text in shown:
            size = _size(text)
            if size > left:
                break
            left -= size
            texts.append(_text(text, links.get((model_of(found.result), text.tokens), ())))
        results.append(
            {
                "model": ", ".join(found.entry.models),
                "variant": _variant(found, block.score),
                "scoreName": block.name,
                "of": block.of,
                "marked": block.marked,
                "scales": [[*scale_ends(block, kind), "around" if kind else "upward"] for kind in row_kinds(block)],
                "rows": [" · ".join(row.name.splitlines()) for row in shown[0].rows] if shown else [],
                "texts": texts,
                "every": len(shown),
            }
        )
    return results


def model_of(result: Result) -> str:
    """Return an identifier of a result's model: its fingerprint, or its name if it has none."""
    return str(result.provenance.get("fingerprint") or result.provenance.get("model", ""))


def _variant(found: LabelledResult, score: str) -> str:
    """Join the score and the other options in which the group's entries differ."""
    rest = found.label.removeprefix(", ".join(found.entry.models)).split(" · ")
    return " · ".join([score, *(part for part in rest if part and part != f"score {score}")])


def _size(text: TokenText) -> int:
    shown = min(len(text.tokens), MAX_TOKENS_PER_TEXT)
    return shown * (16 + 6 * len(text.rows)) + 300


def _text(text: TokenText, links: Sequence[AttentionLink]) -> dict[str, Any]:
    """Pack a text for the page: its first tokens as written, and their scores as little-endian float32.

    `scores` holds the rows one after the other, each with one number per token. For each row, `low` and `high` are the
    ends of the colour scale, `signed` is True for a scale around zero, `out` lists the tokens without colour, `kept`
    the underlined tokens, and `against` the strongest tokens against them.
    """
    shown, special = min(len(text.tokens), MAX_TOKENS_PER_TEXT), text.special
    every = spell_tokens(text.tokens, text.words)
    rows = np.stack([row.scores for row in text.rows]).astype("<f4")
    return {
        "name": name_of([one for one, word in zip(every, text.words) if word is not None] or every),
        "tokens": [shorten(token, MAX_TOKEN_CHARACTERS) for _, token in every[:shown]],
        "gaps": "".join("1" if gap else "0" for gap, _ in every[:shown]),
        "special": [at for at in range(shown) if special[at]],
        "kept": [[int(at) for at in row.marked if at < shown] for row in text.rows],
        "against": [[int(at) for at in row.against if at < shown] for row in text.rows],
        "out": [[] if row.outside is None else np.flatnonzero(row.outside[:shown]).tolist() for row in text.rows],
        "answer": shorten(visible(text.answer), MAX_TOKEN_CHARACTERS),
        "p": format_probability(text.probability),
        "about": unbroken(visible(text.about)),
        "length": len(text.tokens),
        "scores": base64.b64encode(rows[:, :shown].tobytes()).decode(),
        "low": [row.ends[0] for row in text.rows],
        "high": [row.ends[1] for row in text.rows],
        "signed": [row.signed for row in text.rows],
        "range": [" · ".join(filter(None, (row.extent, row.remark))) for row in text.rows],
        "attention": [link._asdict() for link in links],
    }


def name_of(tokens: Sequence[tuple[bool, str]]) -> str:
    """Return the beginning of a text as its name."""
    name = ""
    for gap, token in tokens:
        name += (" " if gap else "") + token
        if len(name) > MAX_NAME_CHARACTERS:
            return name[: MAX_NAME_CHARACTERS - 1] + "…"
    return name


# ---- the page


class SummaryLine(NamedTuple):
    """Line in a cell of the summary: an entry's verdict on a model, its anchor, and a small picture."""

    anchor: str
    state: str
    text: str
    picture: Markup = Markup("")


class Section(NamedTuple):
    """Section of the page with one analysis: its interactive heatmaps as JSON, and how many texts these leave out."""

    group: Group
    items: tuple[Item, ...]
    tables: tuple[Table, ...]
    heatmaps: tuple[Markup, ...]
    left_out: int


def render(report: Report) -> str:
    """Render the report as a complete HTML page: a table of verdicts and failures (models × analyses), then for each
    analysis the comparison of its models, interactive heatmaps, and each entry's figure, table, command and
    provenance."""
    parts = groups(report)
    listed = [items(group) for group in parts]
    links = _links(parts, listed)
    sections = [_section(group, own, links) for group, own in zip(parts, listed)]
    blocks = [part.block for own in listed for _, part in _parts(own)]
    anchors = {item.entry.key: item.anchor for own in reversed(listed) for item in reversed(own)}
    scripts = [file("report.js"), *scripts_of(blocks)]
    page = template("report.html").render(
        report=report,
        grid=grid,
        counts=_counts(report),
        failures=[(one, item) for one in sections for item in one.items if item.entry.state == FAILED],
        summary=_summary(report, sections),
        opening=audit_page.opening(report, anchors),
        closing=audit_page.closing(report, anchors),
        gates=gates_table(report.gates) if report.gates else None,
        gates_headline=gates_headline(report.gates),
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
    if not found:
        return [SummaryLine(item.anchor, DONE, "done, without a result")]
    at = item.entry.models.index(model)
    return [
        SummaryLine(item.anchor, DONE, f"{before}: {line}" if before else line, one.result.sketch(at))
        for one in found
        for line in [verdict(one, model)]
    ]


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
