"""Attacks on single texts as a picture, as the lines of a terminal and as a page."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ssmscope.attacks.worddiff import html_diff, rich_diff
from ssmscope.attacks.words_result import FAILED, SKIPPED, SUCCESS, SUMMARY
from ssmscope.interp.views.tokens import shorten, visible
from ssmscope.results import TABLE_ROWS

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from ssmscope.attacks.words_result import AttackedText, WordAttack

INK, SOFT, BAND, HIT, GRID = "#1b1f24", "#57606a", "#4f97cb", "#d1540a", "#e6e9ed"
SIZE = (8.0, 4.2)
"""In inches."""
TITLE, LINE = 85, 115
"""As many characters as fit in the title, and in the smaller line below it."""
SHOWN = 5
"""How many attacked texts a terminal shows."""


def draw(result: WordAttack) -> Figure:
    """Accuracy against the number of words that an attack may change, a step per word, with its band; the dashed line
    is the accuracy of the clean texts."""
    figure = Figure(figsize=SIZE, facecolor="white")
    width, height = SIZE
    data = result.provenance["data"]
    style: dict[str, Any] = dict(va="center", parse_math=False)  # names are the user's: a $ in them starts no formula
    model = visible(str(result.provenance.get("model", "a model")))
    before = f"{result.recipe} on "
    title = before + shorten(model, TITLE - len(before))
    figure.text(0.2 / width, 1 - 0.3 / height, title, size=11, color=INK, **style)
    name = shorten(visible(f"{data['name']} ({data['split']})"), LINE - 85)
    small = f"{data['examples']:,} examples of {name}, 95 % bootstrap intervals; {_asked(result)}"
    figure.text(0.2 / width, 1 - 0.56 / height, small, size=8.5, color=SOFT, **style)
    axes = figure.add_axes((0.75 / width, 0.62 / height, 1 - 1.95 / width, 1 - 1.5 / height))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=SOFT, labelsize=8.5)
    axes.set_axisbelow(True)
    axes.grid(color=GRID)
    most = len(result.curve) - 1
    # half a step on either side, so that the first and the last number are seen to hold for a while
    edges = np.concatenate([[-0.5], np.arange(most + 1) + 0.5])
    value, low, high = np.vstack([result.curve, result.curve[-1:]]).T
    axes.fill_between(edges, low, high, step="post", color=BAND, alpha=0.28, linewidth=0)
    axes.step(edges, value, where="post", color=BAND, linewidth=1.8)
    axes.axhline(result.accuracy.value, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlim(-0.5, most + 0.5)
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.set_xlabel("words changed at most (attacks that change more do not count)", color=SOFT, size=9)
    axes.set_ylabel("accuracy", color=SOFT, size=9)
    ends = [(result.accuracy.value, "clean", INK), (result.attacked.value, "under attack", HIT)]
    for (accuracy, what, colour), place in zip(ends, _apart(*(accuracy for accuracy, _, _ in ends))):
        text = f"{accuracy:.3f}\n{what}"
        axes.text(1.015, place, text, transform=axes.get_yaxis_transform(), va="center", size=8.5, color=colour)
    return figure


def _apart(upper: float, lower: float, height: float = 0.13, margin: float = 0.05) -> tuple[float, float]:
    """Where two texts of this height stand beside two values, so that neither covers the other or leaves the axes."""
    if upper - lower < height:
        middle = min(max((upper + lower) / 2, margin + height / 2), 1 - margin - height / 2)
        return middle + height / 2, middle - height / 2
    return min(upper, 1 - margin), max(lower, margin)


def _asked(result: WordAttack) -> str:
    if math.isnan(result.queries.value):
        return "nothing was attacked"
    return f"{result.queries.value:.1f} queries per attacked example"


def terminal(result: WordAttack) -> Iterable[RenderableType]:
    """The totals, what was left out, and the texts of which the fewest words had to be changed."""
    from rich.table import Table
    from rich.text import Text

    data = result.provenance["data"]
    yield Text(result.headline, style="italic")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, found in result.summary.items():
        table.add_row(SUMMARY[name], str(found))
    yield table
    counts = {status: sum(each.status == status for each in result.examples) for status in (SUCCESS, FAILED, SKIPPED)}
    listed = ", ".join(f"{count:,} {status}" for status, count in counts.items())
    yield Text(f"\n{data['examples']:,} examples of {data['name']} ({data['split']}): {listed}; {INTERVALS}.")
    yield Text(f"Ran: {'; '.join(result.ran)}.")
    yield from (Text(f"Note: {result.recipe} ran without {part}.") for part in result.left_out)
    if result.successes:
        yield Text("\nThe successes with the fewest changed words:")
    yield from (_example(result, each) for each in result.successes[:SHOWN])


INTERVALS = "95 % bootstrap intervals over examples"


def _example(result: WordAttack, each: AttackedText) -> Text:
    from rich.text import Text

    line = Text(f"row {each.row}, {_turn(result, each)}: ", style="bold")
    return line.append_text(rich_diff(visible(each.text), visible(each.attacked)))


def _turn(result: WordAttack, each: AttackedText) -> str:
    """From which class to which, and what became of the true one's probability."""
    label, answer = visible(result.labels[each.label]), visible(result.labels[each.answer])
    turn = f"{label} → {answer}" if each.answer != each.label else label
    return f"{turn} (p {each.before:.2f} → {each.after:.2f})"


def page(result: WordAttack, picture: bytes) -> str:
    """The picture, the totals, the attacked texts with what was changed in them, and the attack's parts."""
    rows = "".join(
        f"<tr><th>{SUMMARY[name]}</th><td>{html.escape(str(found))}</td></tr>" for name, found in result.summary.items()
    )
    left = "".join(f"<li>left out: {html.escape(part)}</li>" for part in result.left_out)
    ran = "".join(f"<li>{html.escape(part)}</li>" for part in result.ran)
    return (
        f'<div class="ssmscope"><style>{STYLE}</style>'
        f'<img alt="{html.escape(result.headline)}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
        f'<table class="totals">{rows}</table><p>{INTERVALS}.</p>'
        f"{_examples(result)}<h2>What ran</h2><ul>{ran}{left}</ul></div>"
    )


def _examples(result: WordAttack) -> str:
    """The attacked examples: successes with the fewest changed words first, then those that withstood."""
    failed = [each for each in result.examples if each.status == FAILED]
    every = [*result.successes, *failed]
    if not every:
        return "<p>No example is right when clean: nothing was attacked.</p>"
    heads = "".join(f"<th>{head}</th>" for head in ("row", "class", "p of the true class", "words", "queries", "text"))
    rows = []
    for each in every[:TABLE_ROWS]:
        label, answer = html.escape(result.labels[each.label]), html.escape(result.labels[each.answer])
        turn = f"{label} → {answer}" if each.status == SUCCESS else f"{label} <small>failed</small>"
        cells = [
            str(each.row),
            turn,
            f"{each.before:.3f} → {each.after:.3f}",
            f"{each.changed} <small>of {each.words}</small>",
            f"{each.queries:,}",
        ]
        text = f'<td class="text">{html_diff(each.text, each.attacked)}</td>'
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + text + "</tr>")
    rest = f"<p>{TABLE_ROWS} of {len(every):,} attacked examples.</p>" if len(every) > TABLE_ROWS else ""
    return f'<h2>Attacked texts</h2><div class="wide"><table><tr>{heads}</tr>{"".join(rows)}</table></div>{rest}'


STYLE = """
.ssmscope { --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #ffffff; --added: #cdeccd; --removed: #ffd9d0;
  color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
.ssmscope img { max-width: 100%; background: #fff; }
.ssmscope .wide { overflow-x: auto; }
.ssmscope table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
.ssmscope th, .ssmscope td { padding: 4px 14px 4px 0; text-align: left; vertical-align: top; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
.ssmscope td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 24em; }
.ssmscope small { color: var(--soft); }
.ssmscope h2 { font-size: 16px; margin: 24px 0 6px; }
.ssmscope ins { background: var(--added); text-decoration: underline; }
.ssmscope del { background: var(--removed); text-decoration: line-through; }
@media (prefers-color-scheme: dark) {
  .ssmscope { --ink: #e6edf3; --soft: #9da7b3; --line: #30363d; --paper: #0f141a; --added: #1c4428;
    --removed: #5a2418; } }
"""
