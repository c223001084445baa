"""Views of attacks on single texts: the attacked texts with their changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup
from rich.text import Text

from ssmscope.api.results import TABLE_ROWS
from ssmscope.render.tokens import visible
from ssmscope.render.worddiff import html_diff, rich_diff

if TYPE_CHECKING:
    from ssmscope.attacks.words.result import AttackedText, WordAttack

MAX_TERMINAL_TEXTS = 5
STYLE = """
.ssmscope .texts td { white-space: nowrap; }
.ssmscope .texts td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 24em; }
"""


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
    table = (
        '<div class="wide" tabindex="0"><table class="texts"><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    )
    cut = f'<p class="note">{TABLE_ROWS} of {len(attacked):,} attacked examples.</p>'
    return Markup(table + (cut if len(attacked) > TABLE_ROWS else "")).format(in_tags("th", heads), rows)


def in_tags(tag: str, parts: Sequence[object]) -> Markup:
    return Markup("").join(Markup(f"<{tag}>{{}}</{tag}>").format(part) for part in parts)
