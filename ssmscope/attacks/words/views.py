"""Views of attacks on single texts: the figure, and the attacked texts with their changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from rich.text import Text

from ssmscope.api.results import TABLE_ROWS
from ssmscope.render import figure as plot
from ssmscope.render.tokens import visible
from ssmscope.render.worddiff import html_diff, rich_diff

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssmscope.attacks.words.result import AttackedText, WordAttack

MAX_TERMINAL_TEXTS = 5
STYLE = """
.ssmscope .texts td { white-space: nowrap; }
.ssmscope .texts td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 24em; }
"""


def draw(result: WordAttack, frame: plot.Frame) -> Figure:
    """Draw accuracy against the number of words that an attack may change; the dashed line is the clean accuracy."""
    queries = result.queries.value
    told = "nothing was attacked" if math.isnan(queries) else f"{queries:.1f} queries per attacked example"
    clean, attacked = f"clean {result.accuracy.value:.3f}", f"under attack {result.attacked.value:.3f}"
    legend = [(plot.rule(plot.SOFT), clean), (plot.rule(plot.COLOURS[0], "-"), attacked)]
    sheet = plot.Sheet(frame, f"{result.recipe} on {result.model_name}", plot.data_line(result, told), legend)
    (axes,) = sheet.panels(2.6)
    most = len(result.curve) - 1
    # Half a step on either side makes the first and the last value visible.
    edges = np.concatenate([[-0.5], np.arange(most + 1) + 0.5])
    value, low, high = np.vstack([result.curve, result.curve[-1:]]).T
    axes.fill_between(edges, low, high, step="post", color=plot.COLOURS[0], alpha=0.2, linewidth=0)
    axes.step(edges, value, where="post", color=plot.COLOURS[0], linewidth=1.8)
    axes.axhline(result.accuracy.value, color=plot.SOFT, linewidth=1, linestyle=plot.DASHED)
    plot.integers(axes.xaxis)
    axes.set(xlim=(-0.5, most + 0.5), ylim=(0, 1), ylabel="accuracy")
    axes.set_xlabel("maximum number of changed words (other attacks do not count)")
    return sheet.figure


def terminal_texts(result: WordAttack) -> Iterator[Text]:
    """Yield the successes with the fewest changed words."""
    yield Text("The successes with the fewest changed words:" if result.successes else "No attack succeeded.")
    for each in result.successes[:MAX_TERMINAL_TEXTS]:
        line = Text(f"row {each.row}, {_turn(result, each)}: ", style="bold")
        yield line.append_text(rich_diff(visible(each.text), visible(each.attacked)))


def _turn(result: WordAttack, each: AttackedText) -> str:
    """Describe the change of class and of the true class's probability."""
    label, answer = visible(result.labels[each.label]), visible(result.labels[each.answer])
    turn = f"{label} → {answer}" if each.answer != each.label else label
    return f"{turn} (p {each.before:.2f} → {each.after:.2f})"


def html_texts(result: WordAttack, attacked: Sequence[AttackedText]) -> str:
    """Render a table of the first attacked texts."""
    won = set(result.successes)
    heads = ("row", "class", "p of the true class", "words", "queries", "text")
    rows = Markup("")
    for each in attacked[:TABLE_ROWS]:
        label, answer = result.labels[each.label], result.labels[each.answer]
        turn = f"{label} → {answer}" if each in won else Markup("{} <small>failed</small>").format(label)
        words = Markup("{} <small>of {}</small>").format(each.changed, each.words)
        cells = (each.row, turn, f"{each.before:.3f} → {each.after:.3f}", words, f"{each.queries:,}")
        text = Markup(html_diff(each.text, each.attacked))
        rows += Markup('<tr>{}<td class="text">{}</td></tr>').format(in_tags("td", cells), text)
    table = '<div class="wide"><table class="texts"><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    cut = f'<p class="note">{TABLE_ROWS} of {len(attacked):,} attacked examples.</p>'
    return Markup(table + (cut if len(attacked) > TABLE_ROWS else "")).format(in_tags("th", heads), rows)


def in_tags(tag: str, parts: Sequence[object]) -> Markup:
    return Markup("").join(Markup(f"<{tag}>{{}}</{tag}>").format(part) for part in parts)
