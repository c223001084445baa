"""Views of a scorecard: the table of a page, the figure of a paper, and plain tables."""

from __future__ import annotations

import math
from collections.abc import Iterator

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ssmscope.api.scores import HIGHER, LOWER, SHARE_UNIT, Score
from ssmscope.core.bootstrap import Estimate
from ssmscope.render import figure as plot
from ssmscope.render.letters import short_name
from ssmscope.render.numbers import brackets, number
from ssmscope.render.table import Cell, Table, in_percent
from ssmscope.render.tokens import visible
from ssmscope.reports.intervals import interval
from ssmscope.reports.scorecard import Entry, Row, Scorecard

ARROWS = {HIGHER: "↑", LOWER: "↓"}
STATES = {"better": "▲ better", "worse": "▼ worse", "differs": "◆ differs"}
"""Marks of differences that hold, readable without colour."""
COLOURS = {"better": plot.COLOURS[0], "worse": plot.COLOURS[1], "differs": plot.COLOURS[3]}
APART = "†"
"""Mark of rows in which nothing is compared."""
WIDTH, HEIGHT, SIDE = 132, 18, 5
"""Size of a drawn range in pixels, and its margin at either side."""


def shown(score: Score, found: Estimate | None = None) -> str:
    """Format a score, or a difference of such scores, with its interval, without its unit unless in percent."""
    found = interval(score) if found is None else found
    if score.unit == SHARE_UNIT:
        return in_percent(found)
    if math.isnan(found.value):
        return "not defined"
    return number(found.value) + brackets(found)


def difference_shown(entry: Entry) -> str:
    """Describe a difference that holds, "▼ worse by 7.5 % [4.1, 10.9]"; empty for others."""
    if not entry.state or entry.difference is None:
        return ""
    found = entry.difference
    size = Estimate(-found.value, -found.high, -found.low) if found.value < 0 else found
    return f"{STATES[entry.state]} by {shown(entry.score, size)}"


def note(card: Scorecard) -> str:
    """Sentences on intervals, reference and correction, and on the rows that stand apart."""
    told = "Bars are 95 % intervals, Wilson's of shares."
    if card.compared:
        told = (
            "Bars are 95 % intervals, Wilson's of shares; "
            f"the dashed line is {visible(card.reference)}. ▲ and ▼ mark differences from it that "
            f"hold at 95 % for all {card.compared} together (Holm), paired where the examples are the same."
        )
    apart: dict[str, list[str]] = {}
    for row in card.rows:
        if row.apart:
            apart.setdefault(row.apart, []).append(row.heading)
    reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in apart.items())
    return told + f" {APART} Not compared: {reasons}." * bool(apart)


def heading(row: Row) -> str:
    """Return the heading of a row, with its mark if it stands apart."""
    return row.heading + f" {APART}" * bool(row.apart)


# ---- the page


def html(card: Scorecard) -> Markup:
    """Render the card as a table."""
    heads = Markup("").join(Markup('<th scope="col" dir="auto">{}</th>').format(visible(name)) for name in card.models)
    rows = Markup("").join(_html_row(row) for row in card.rows)
    return Markup(
        '<div class="wide" tabindex="0" role="region" aria-label="Scorecard: dimensions and models">'
        '<table class="card"><thead><tr><th scope="col">dimension</th>{}</tr></thead><tbody>{}</tbody></table></div>'
        '<p class="note">{}</p>'
    ).format(heads, rows, note(card))


def _html_row(row: Row) -> Markup:
    head = Markup('<th scope="row">{} <small>{} {}</small></th>').format(
        heading(row), row.measure, ARROWS.get(row.better, "")
    )
    cells = Markup("")
    for entry, reference in zip(row.entries, row.references):
        if entry is None:
            cells += Markup('<td><span class="nothing">not measured</span></td>')
            continue
        mark = difference_shown(entry)
        told = Markup('<b class="{}">{}</b>').format(entry.state, mark) if mark else Markup("")
        drawn = _range(row, entry, reference)
        cells += Markup("<td>{}<span>{}</span>{}</td>").format(drawn, shown(entry.score), told)
    return Markup("<tr>{}{}</tr>").format(head, cells)


def _range(row: Row, entry: Entry, reference: Score | None) -> Markup:
    """Draw a score's interval on the row's axis, and the reference as a dashed line; its numbers stand next to it."""
    low, high = row.ends

    def place(value: float) -> float:
        return round(SIDE + (WIDTH - 2 * SIDE) * (value - low) / (high - low), 1)

    one, middle = interval(entry.score), HEIGHT // 2
    parts = Markup('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(SIDE, WIDTH - SIDE, middle, middle)
    if reference is not None and math.isfinite(reference.value):
        at = place(reference.value)
        parts += Markup('<line class="reference" x1="{}" x2="{}" y1="1" y2="{}"/>').format(at, at, HEIGHT - 1)
    if one.low < one.high:
        ends = place(one.low), place(one.high)
        parts += Markup('<line class="interval" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(*ends, middle, middle)
    if math.isfinite(one.value):
        parts += Markup('<circle cx="{}" cy="{}" r="4"/>').format(place(one.value), middle)
    size = {"width": WIDTH, "height": HEIGHT, "state": entry.state, "parts": parts}
    return Markup(
        '<svg class="range {state}" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'aria-hidden="true" focusable="false">{parts}</svg>'
    ).format(**size)


# ---- the figure


def draw(card: Scorecard, frame: plot.Frame) -> Figure:
    """Draw a panel per model with a point and an interval per dimension, each row on its own axis."""
    legend = [(plot.handle(5, linestyle="none", marker="o"), "score with its 95 % interval")]
    if card.compared:
        legend.append((plot.rule(), f"reference: {visible(card.reference)}"))
        states = {entry.state for row in card.rows for entry in row.entries if entry is not None} - {""}
        for state in sorted(states):
            legend.append((plot.rule(COLOURS[state], "-"), f"{STATES[state]}, holds for all rows together"))
    note_on_rows = "each row has its own axis; shares of accuracy run from 0 to 100 %"
    note_on_rows += f"; {APART} not compared" * any(row.apart for row in card.rows)
    sheet = plot.Sheet(frame, "Robustness", note_on_rows, legend, width=3.4 + 3.6 * len(card.models))
    height = plot.ROW_INCHES * len(card.rows)
    panels = sheet.panels(height, across=len(card.models), sharey=True)
    for column, (axes, name) in enumerate(zip(panels, card.models)):
        axes.grid(False)
        axes.set_title(short_name(name, 34))
        for at, row in enumerate(card.rows):
            _draw_cell(axes, at, row, column)
        axes.set(xlim=(-0.04, 1.04), ylim=(len(card.rows) - 0.4, -0.6), xticks=[])
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(left=False)
    names = [f"{heading(row)} ({row.measure}) {ARROWS.get(row.better, '')}" for row in card.rows]
    panels[0].set_yticks(range(len(card.rows)), names)
    return sheet.figure


def _draw_cell(axes: Axes, at: int, row: Row, column: int) -> None:
    entry, reference = row.entries[column], row.references[column]
    low, high = row.ends
    axes.plot([0, 1], [at, at], color=plot.GRID, linewidth=1, zorder=0)
    if entry is None:
        return
    score, colour = interval(entry.score), COLOURS.get(entry.state, plot.COLOURS[5])

    def place(value: float) -> float:
        return (value - low) / (high - low)

    if reference is not None and math.isfinite(reference.value):
        axes.plot(
            [place(reference.value)] * 2, [at - 0.32, at + 0.32], color=plot.INK, linewidth=1, linestyle=(0, (2, 1))
        )
    if score.low < score.high:
        axes.plot([place(score.low), place(score.high)], [at, at], color=colour, linewidth=2.6)
    if math.isfinite(score.value):
        axes.plot(place(score.value), at, "o", color=colour, markersize=4.5, clip_on=False, zorder=3)
    sign = STATES[entry.state][0] + " " if entry.state else ""
    plot.beside(axes, at, sign + shown(entry.score))


# ---- plain tables


def table(card: Scorecard) -> Table:
    """Return the card as a table: a row per dimension, a column per model, and for others one of the differences."""
    compared = [any(_difference(row, at) is not None for row in card.rows) for at in range(len(card.models))]
    columns: list[str] = []
    for name, more in zip(card.models, compared):
        columns += [name, f"{name} − reference"] if more else [name]
    rows = [
        ((heading(row), f"{row.measure} {ARROWS.get(row.better, '')}".strip()), tuple(_cells(row, compared)))
        for row in card.rows
    ]
    return Table(("dimension", "measure"), tuple(columns), tuple(rows), note(card))


def _difference(row: Row, at: int) -> Estimate | None:
    entry = row.entries[at]
    return None if entry is None else entry.difference


def _cells(row: Row, compared: list[bool]) -> Iterator[Cell]:
    for at, entry in enumerate(row.entries):
        yield Cell() if entry is None else Cell(text=shown(entry.score))
        if compared[at]:
            found = _difference(row, at)
            sign = f"{STATES[entry.state][0]} " if entry is not None and entry.state else ""
            yield Cell() if entry is None or found is None else Cell(text=sign + shown(entry.score, found))
