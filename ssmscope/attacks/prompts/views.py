"""Views of attacks on prompts: the worst prompts with their changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from markupsafe import Markup, escape
from rich.text import Text

from ssmscope.attacks.names import SEMANTIC
from ssmscope.render.html import grid
from ssmscope.render.table import Cell, Line, in_percent, table
from ssmscope.render.worddiff import html_diff, rich_diff

if TYPE_CHECKING:
    from ssmscope.attacks.prompts.result import PromptAttack, PromptAttacker

UNCHANGED = "no prompt it tried is worse than the template"
STYLE = """
.ssmscope .prompt { white-space: pre-wrap; overflow-wrap: anywhere; margin: 2px 0 12px; }
"""


def _prompts(one: PromptAttacker, result: PromptAttack) -> tuple[str, str]:
    """Return the template with the largest drop, and its worst prompt."""
    assert one.worst is not None
    return result.templates[one.worst], one.prompts[one.worst].prompt or ""


def terminal_prompts(result: PromptAttack) -> Iterator[Text]:
    """Yield the worst prompt of each attack with its changes."""
    for number, one in enumerate(one for one in result.attacks if one.worst is not None):
        before, after = _prompts(one, result)
        where = f", template {one.worst}" if len(result.templates) > 1 else ""
        line = Text("\n" if number else "").append(f"{one.name}{where}: ", style="bold")
        if after == before:
            yield line.append(UNCHANGED)
        elif one.name == SEMANTIC:
            yield line.append(after.replace("\n", "⏎"))
        else:
            yield line.append_text(rich_diff(before, after))


def html_prompts(result: PromptAttack) -> str:
    """Render the worst prompts with numbers and, folded away, the templates and the parts of each attack."""
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
    item = Markup("<li><b>{}</b>: {}</li>")
    parts = Markup("").join(item.format(one.name, "; ".join(one.ran)) for one in result.attacks)
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
        low, high = (min(values), max(values)) if len(set(values)) > 1 else (None, None)
        cells = [
            Cell(each.drop.times(100), digits=1, best=each.drop.value == low, worst=each.drop.value == high)
            for each in one.prompts
        ]
        drops.append(Line((one.name,), dict(zip(columns, [*cells, Cell(one.drop.times(100), digits=1)]))))
    note = (
        "Drop (PDR) in %; the worst prompts were chosen on the same examples. The template with the smallest drop of "
        "each attack is bold, the one with the largest underlined."
    )
    return grid(table(("accuracy",), accuracies)) + grid(replace(table(("drop in %",), drops), note=note))
