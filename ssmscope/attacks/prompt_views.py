"""Attacks on prompts as a picture, as the lines of a terminal and as a page."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from ssmscope.attacks.position import percent, share
from ssmscope.attacks.worddiff import html_diff, rich_diff
from ssmscope.bootstrap import Estimate
from ssmscope.interp.views.tokens import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import RenderableType
    from rich.text import Text

    from ssmscope.attacks.prompt_result import PromptAttack, PromptAttacker

INK, SOFT, CLEAN, HIT, GRID = "#1b1f24", "#57606a", "#3d7fb5", "#d1540a", "#e6e9ed"
WIDTH, HEADER, FOOTER, LEFT, RIGHT = 8.0, 0.95, 0.62, 1.35, 1.75
"""In inches: the figure, what stands above and below the panel, and at its sides."""
ROW, GAP, LIFT = 0.2, 0.14, 0.04
"""In inches: a template's row, what parts two attacks, and how far off its row's middle a mark stands."""
TITLE, SMALL = 90, 115
"""As many characters as fit in the title, and in the smaller line below it."""
REWRITTEN = "semantic"
"""The attack whose prompts are not changed ones of the template: its worst prompt is shown as it is."""


def draw(result: PromptAttack) -> Figure:
    """A row for each attack and template: the clean accuracy (a ring) and the attacked one (a dot), each on its
    interval, and beside each attack its average drop."""
    number = len(result.templates)
    row = ROW if number > 1 else 1.5 * ROW
    panel = len(result.attacks) * (number * row + GAP)
    height = HEADER + panel + FOOTER
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    data = result.provenance["data"]
    name = shorten(visible(f"{data['name']} ({data['split']})"), SMALL - 85)
    style: dict[str, Any] = dict(va="center", parse_math=False)  # names are the user's: a $ in them starts no formula
    model = visible(str(result.provenance.get("model", "a model")))
    figure.text(
        0.2 / WIDTH, 1 - 0.3 / height, f"Prompt attacks on {shorten(model, TITLE - 18)}", size=11, color=INK, **style
    )
    templates = f"{number} templates" if number > 1 else "one template"
    way = "as PromptBench" if result.as_promptbench else "not as PromptBench"
    small = f"{templates}, {data['examples']:,} examples of {name}, 95 % bootstrap intervals, measured {way}"
    figure.text(0.2 / WIDTH, 1 - 0.56 / height, small, size=8.5, color=SOFT, **style)
    inner = (LEFT / WIDTH, FOOTER / height, 1 - (LEFT + RIGHT) / WIDTH, panel / height)
    _rows(figure.add_axes(inner), result, row, panel)
    return figure


def _rows(axes: Axes, result: PromptAttack, row: float, panel: float) -> None:
    number = len(result.templates)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)
    axes.tick_params(axis="x", colors=SOFT, labelsize=8.5)
    axes.tick_params(axis="y", length=0, colors=SOFT, labelsize=6.5, pad=2)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=GRID)
    places, labels = [], []
    for index, one in enumerate(result.attacks):
        top = GAP / 2 + index * (number * row + GAP)
        if index:
            axes.axhline(top - GAP / 2, color=GRID, linewidth=0.8)
        for at, (clean, found) in enumerate(zip(result.clean, one.prompts)):
            place = top + (at + 0.5) * row
            places.append(place)
            labels.append(str(at + 1) if number > 1 else "")
            _pair(axes, place, clean, found.accuracy, index == at == 0)
        middle = top + number * row / 2
        beside = axes.get_yaxis_transform()
        text = "no drop defined" if math.isnan(one.drop.value) else f"drop {percent(one.drop)} %".replace("-", "−")
        axes.text(-0.055, middle, one.name, transform=beside, ha="right", va="center", size=9, color=INK)
        axes.text(1.02, middle, text, transform=beside, va="center", size=8, color=INK)
    axes.axvline(result.average_clean.value, color=SOFT, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    axes.set_yticks(places, labels)
    axes.set_ylim(panel, 0)
    axes.set_xlim(-0.01, 1.01)
    axes.set_xlabel("accuracy; the dashed line is the mean clean one", color=SOFT, size=9)
    legend = dict(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8, frameon=False, borderaxespad=0.1)
    axes.legend(**legend)


def _pair(axes: Axes, place: float, clean: Estimate, hit: Estimate, labelled: bool) -> None:
    """Both of one template, the clean one a little above."""
    rows = ((clean, -1, CLEAN, "white", "clean prompt"), (hit, 1, HIT, HIT, "worst prompt found"))
    for found, side, colour, inside, name in rows:
        at = place + side * LIFT
        axes.plot([found.low, found.high], [at, at], color=colour, linewidth=1.2, solid_capstyle="butt", zorder=2)
        style: dict[str, Any] = dict(linestyle="none", markersize=4, clip_on=False, zorder=3)
        label = name if labelled else "_"
        axes.plot([found.value], [at], "o", color=colour, markerfacecolor=inside, label=label, **style)


def terminal(result: PromptAttack) -> Iterable[RenderableType]:
    """A short table, the worst prompt of each attack, what was left out, and what it took."""
    from rich.table import Table
    from rich.text import Text

    data, several = result.provenance["data"], len(result.templates) > 1
    table = Table(title=Text(result.headline), title_justify="left", box=None, pad_edge=False)
    headings = ["prompt", "accuracy", "drop (PDR) in %", *(["worst drop in %"] if several else []), "tried"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "prompt" else "right", no_wrap=True)
    table.add_row("clean", str(result.average_clean))
    for one in result.attacks:
        worst = [] if not several else ["–" if one.worst is None else _worst(one)]
        tried = f"{sum(found.tried for found in one.prompts):,}"
        table.add_row(one.name, str(one.accuracy), percent(one.drop), *worst, tried)
    yield table
    templates = f"{len(result.templates)} templates" if several else "one template"
    yield Text(
        f"\n{data['examples']:,} examples of {data['name']} ({data['split']}), {templates}"
        f"{' (averages over them)' if several else ''}; 95 % bootstrap intervals. {result.measured}"
    )
    yield from (_worst_prompt(result, one) for one in result.attacks if one.worst is not None)
    left = [f"{one.name} ran without {part}" for one in result.attacks for part in one.left_out]
    if left:
        yield Text("")
    yield from (Text(f"Note: {note}.") for note in (*left, *result.notes))
    cost = result.cost
    yield Text(
        f"{cost.asked:,} filled prompts, of which the model ran {cost.run:,}, in {cost.seconds:,.1f} s.", style="dim"
    )


def _worst(one: PromptAttacker) -> str:
    assert one.worst is not None
    return f"{100 * one.prompts[one.worst].drop.value:.1f} (template {one.worst + 1})"


def _worst_prompt(result: PromptAttack, one: PromptAttacker) -> Text:
    from rich.text import Text

    assert one.worst is not None
    before, after = result.templates[one.worst], one.prompts[one.worst].prompt or ""
    where = f", template {one.worst + 1}" if len(result.templates) > 1 else ""
    line = Text("\n").append(f"{one.name}{where}: ", style="bold")
    if after == before:
        return line.append("no prompt it tried is worse than the template")
    return line.append_text(Text(after.replace("\n", "⏎")) if one.name == REWRITTEN else rich_diff(before, after))


def page(result: PromptAttack, picture: bytes) -> str:
    """The picture, the table, the worst prompts with what was changed in them, the templates and the attacks' parts."""
    return (
        f'<div class="ssmscope"><style>{STYLE}</style>'
        f'<img alt="{html.escape(result.headline)}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
        f'<div class="wide">{_table(result)}</div>'
        "<p>Accuracy, and below it the drop (PDR) in %, with 95 % bootstrap intervals over "
        f"{result.provenance['data']['examples']:,} examples, on which the worst prompts were also chosen. Of each "
        'attack the template that holds best is <b class="best">bold</b>, the one that breaks most '
        f'<span class="worst">underlined</span>. {html.escape(result.measured)}</p>'
        f"{_prompts(result)}{_templates(result)}{_parts(result)}{_notes(result)}</div>"
    )


def _table(result: PromptAttack) -> str:
    several = len(result.templates) > 1
    heads = ["prompt", *([f"template {i}" for i in range(1, len(result.templates) + 1)]), *(["average"] * several)]
    rows = ["".join(f"<th>{head}</th>" for head in heads)]
    means = [result.average_clean] * several
    rows.append("<th>clean</th>" + "".join(f"<td>{_ends(found)}</td>" for found in (*result.clean, *means)))
    for one in result.attacks:
        defined = [found.drop.value for found in one.prompts if not math.isnan(found.drop.value)]
        spread = several and len(set(defined)) > 1
        cells = []
        for found in one.prompts:
            text = f"{_ends(found.accuracy)}<br>{_drop(found.drop)}"
            if spread and found.drop.value == min(defined):
                text = f'<b class="best">{text}</b>'
            elif spread and found.drop.value == max(defined):
                text = f'<span class="worst">{text}</span>'
            cells.append(text)
        cells += [f"{_ends(one.accuracy)}<br>{_drop(one.drop)}"] * several
        rows.append(f"<th>{html.escape(one.name)}</th>" + "".join(f"<td>{cell}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _ends(found: Estimate) -> str:
    if math.isnan(found.value):
        return share(found.value)
    return f"{found.value:.3f} <small>[{found.low:.3f}, {found.high:.3f}]</small>"


def _drop(found: Estimate) -> str:
    if math.isnan(found.value):
        return "no drop defined"
    text = f"{100 * found.value:.1f} % <small>[{100 * found.low:.1f}, {100 * found.high:.1f}]</small>"
    return text.replace("-", "−")


def _prompts(result: PromptAttack) -> str:
    parts = []
    for one in result.attacks:
        if one.worst is None:
            continue
        before, after = result.templates[one.worst], one.prompts[one.worst].prompt or ""
        if after == before:
            shown = "<p>No prompt it tried is worse than the template.</p>"
        else:
            written = html.escape(after) if one.name == REWRITTEN else html_diff(before, after)
            shown = f'<p class="prompt">{written}</p>'
        clean, found = result.clean[one.worst], one.prompts[one.worst]
        numbers = f"{clean.value:.3f} → {found.accuracy.value:.3f}, drop {_drop(found.drop)}"
        parts.append(f"<h3>{html.escape(one.name)}, template {one.worst + 1}: {numbers}</h3>{shown}")
    return f"<h2>The worst prompts</h2>{''.join(parts)}" if parts else ""


def _templates(result: PromptAttack) -> str:
    items = "".join(f'<li class="prompt">{html.escape(template)}</li>' for template in result.templates)
    return f"<h2>Templates</h2><ol>{items}</ol>"


def _parts(result: PromptAttack) -> str:
    items = []
    for one in result.attacks:
        left = "".join(f"<br>left out: {html.escape(part)}" for part in one.left_out)
        items.append(f"<li><b>{html.escape(one.name)}</b>: {html.escape('; '.join(one.ran))}{left}</li>")
    return f"<h2>What ran</h2><ul>{''.join(items)}</ul>"


def _notes(result: PromptAttack) -> str:
    cost = result.cost
    took = f"{cost.asked:,} filled prompts, of which the model ran {cost.run:,}, in {cost.seconds:,.1f} s"
    return "".join(f"<p>{html.escape(note)}.</p>" for note in (*result.notes, took))


STYLE = """
.ssmscope { --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #ffffff; --added: #cdeccd; --removed: #ffd9d0;
  color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
.ssmscope img { max-width: 100%; background: #fff; }
.ssmscope .wide { overflow-x: auto; }
.ssmscope table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
.ssmscope th, .ssmscope td { padding: 4px 14px 4px 0; text-align: left; vertical-align: top; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
.ssmscope small { color: var(--soft); font-weight: 400; }
.ssmscope .worst { text-decoration: underline; text-decoration-thickness: 2px; text-underline-offset: 3px; }
.ssmscope h2 { font-size: 16px; margin: 24px 0 6px; }
.ssmscope h3 { font-size: 14px; margin: 14px 0 4px; font-weight: 600; }
.ssmscope .prompt { white-space: pre-wrap; overflow-wrap: anywhere; margin: 2px 0 8px; }
.ssmscope ins { background: var(--added); text-decoration: underline; }
.ssmscope del { background: var(--removed); text-decoration: line-through; }
@media (prefers-color-scheme: dark) {
  .ssmscope { --ink: #e6edf3; --soft: #9da7b3; --line: #30363d; --paper: #0f141a; --added: #1c4428;
    --removed: #5a2418; } }
"""
