"""Views of attacks on prompts: the figure, and the worst prompts with their changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape
from rich.text import Text

from ssmscope.attacks.recipes import SEMANTIC
from ssmscope.core.bootstrap import Estimate
from ssmscope.render.figure import COLOURS, DASHED, GRID, INK, SOFT, Sheet, data_line, interval
from ssmscope.render.html import grid
from ssmscope.render.table import Cell, Line, in_percent, table
from ssmscope.render.worddiff import html_diff, rich_diff

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.attacks.prompts.result import PromptAttack, PromptAttacker

WIDTH, HEADER, FOOTER, LEFT, RIGHT = 8.0, 0.95, 0.62, 1.35, 1.75
"""In inches: the figure, and the margins above, below, left and right of the panel."""
ROW, GAP, LIFT = 0.2, 0.14, 0.04
"""In inches: a template's row, the gap between two attacks, and a mark's distance from the middle of its row."""
UNCHANGED = "no prompt it tried is worse than the template"
STYLE = """
.ssmscope .prompt { white-space: pre-wrap; overflow-wrap: anywhere; margin: 2px 0 12px; }
"""


def draw(result: PromptAttack) -> Figure:
    """Draw a row for each attack and template: the clean accuracy (ring) and the attacked one (dot) with intervals. The
    average drop stands next to each attack."""
    number = len(result.templates)
    row = ROW if number > 1 else 1.5 * ROW
    panel = len(result.attacks) * (number * row + GAP)
    templates = f"{number} templates" if number > 1 else "one template"
    way = f"measured {'' if result.as_promptbench else 'not '}as PromptBench"
    title = ("Prompt attacks on ", result.model_name, "")
    sheet = Sheet(WIDTH, HEADER + panel + FOOTER, title, data_line(result, templates, way))
    _rows(sheet.panel(LEFT, HEADER, WIDTH - LEFT - RIGHT, panel, grid="x"), result, row, panel)
    return sheet.figure


def _rows(axes: Axes, result: PromptAttack, row: float, panel: float) -> None:
    number = len(result.templates)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=6.5, pad=2)
    places, labels = [], []
    for index, one in enumerate(result.attacks):
        top = GAP / 2 + index * (number * row + GAP)
        if index:
            axes.axhline(top - GAP / 2, color=GRID, linewidth=0.8)
        for at, (clean, found) in enumerate(zip(result.clean, one.prompts)):
            place = top + (at + 0.5) * row
            places.append(place)
            labels.append(str(at) if number > 1 else "")
            _pair(axes, place, clean, found.accuracy, index == at == 0)
        middle = top + number * row / 2
        beside = axes.get_yaxis_transform()
        text = "no drop defined" if math.isnan(one.drop.value) else f"drop {in_percent(one.drop)}"
        axes.text(-0.055, middle, one.name, transform=beside, ha="right", va="center", size=9, color=INK)
        axes.text(1.02, middle, text, transform=beside, va="center", size=8, color=INK)
    axes.axvline(result.average_clean.value, color=SOFT, linewidth=0.9, linestyle=DASHED, zorder=0)
    axes.set_yticks(places, labels)
    axes.set_ylim(panel, 0)
    axes.set_xlim(-0.01, 1.01)
    axes.set_xlabel("accuracy; the dashed line is the mean clean one", color=SOFT, size=9)
    legend = dict(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8, frameon=False, borderaxespad=0.1)
    axes.legend(**legend)


def _pair(axes: Axes, place: float, clean: Estimate, hit: Estimate, labelled: bool) -> None:
    """Draw both accuracies of one template, the clean one a little above."""
    rows = ((clean, -1, COLOURS[0], "white", "clean prompt"), (hit, 1, COLOURS[1], COLOURS[1], "worst prompt found"))
    for found, side, colour, inside, name in rows:
        at = place + side * LIFT
        interval(axes, at, found, colour, upright=False)
        style: dict[str, Any] = dict(linestyle="none", markersize=4, clip_on=False, zorder=3)
        label = name if labelled else "_"
        axes.plot([found.value], [at], "o", color=colour, markerfacecolor=inside, label=label, **style)


def _prompts(one: PromptAttacker, result: PromptAttack) -> tuple[str, str]:
    """Return the template with the largest drop, and its worst prompt."""
    assert one.worst is not None
    return result.templates[one.worst], one.prompts[one.worst].prompt or ""


def terminal_prompts(result: PromptAttack) -> Iterator[Text]:
    """Yield the worst prompt of each attack with its changes."""
    for number, one in enumerate(one for one in result.attacks if one.worst is not None):
        before, after = _prompts(one, result)
        where = f", template {one.worst}" if len(result.templates) > 1 and one.worst is not None else ""
        line = Text("\n" if number else "").append(f"{one.name}{where}: ", style="bold")
        if after == before:
            yield line.append(UNCHANGED)
        elif one.name == SEMANTIC:
            yield line.append(after.replace("\n", "⏎"))
        else:
            yield line.append_text(rich_diff(before, after))


def html_prompts(result: PromptAttack) -> str:
    """Render the same with numbers and, folded away, the templates and the parts of each attack."""
    shown = Markup("")
    for one in result.attacks:
        if one.worst is None:
            continue
        before, after = _prompts(one, result)
        if after == before:
            marked = escape(f"{UNCHANGED[0].upper()}{UNCHANGED[1:]}.")
        else:
            marked = escape(after) if one.name == SEMANTIC else Markup(html_diff(before, after))
        found = one.prompts[one.worst]
        numbers = f"{result.clean[one.worst].value:.3f} → {found.accuracy.value:.3f}, drop {in_percent(found.drop)}"
        head = Markup("<b>{}, template {}</b>: {}").format(one.name, one.worst, numbers)
        shown += Markup('<div>{}</div><p class="prompt">{}</p>').format(head, marked)
    items = Markup("").join(Markup('<li class="prompt">{}</li>').format(template) for template in result.templates)
    parts = Markup("").join(
        Markup("<li><b>{}</b>: {}</li>").format(one.name, "; ".join(one.ran)) for one in result.attacks
    )
    templates = Markup('<details><summary>Templates</summary><ol start="0">{}</ol></details>').format(items)
    return shown + templates + Markup("<details><summary>What ran</summary><ul>{}</ul></details>").format(parts)


def by_template(result: PromptAttack) -> str:
    """Render accuracy and drop of each attack under each template as two tables, an attack's extreme drops marked."""
    columns = [*(f"template {number}" for number in range(len(result.templates))), "average"]
    accuracies = [Line(("clean",), dict(zip(columns, map(Cell, (*result.clean, result.average_clean)))))]
    drops = []
    for one in result.attacks:
        found = (*(each.accuracy for each in one.prompts), one.accuracy)
        accuracies.append(Line((one.name,), dict(zip(columns, map(Cell, found)))))
        values = [each.drop.value for each in one.prompts if not math.isnan(each.drop.value)]
        spread = len(set(values)) > 1
        cells = [
            Cell(
                each.drop.times(100),
                digits=1,
                best=spread and each.drop.value == min(values),
                worst=spread and each.drop.value == max(values),
            )
            for each in one.prompts
        ]
        drops.append(Line((one.name,), dict(zip(columns, [*cells, Cell(one.drop.times(100), digits=1)]))))
    note = (
        "Drop (PDR) in %; the worst prompts were chosen on the same examples. The template with the smallest drop of "
        "each attack is bold, the one with the largest underlined."
    )
    return grid(table(("accuracy",), accuracies)) + grid(replace(table(("drop in %",), drops), note=note))
