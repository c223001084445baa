"""Views of texts whose answer changes with typing errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from markupsafe import Markup
from rich.text import Text

from ssmscope.attacks.words.views import in_tags
from ssmscope.render.tokens import visible
from ssmscope.render.worddiff import html_diff, rich_diff

if TYPE_CHECKING:
    from ssmscope.attacks.noise.result import Mistyped, NoiseCurve

MAX_TERMINAL_TEXTS = 5


def _turn(result: NoiseCurve, each: Mistyped) -> str:
    return f"{visible(result.classes[each.label])} → {visible(result.classes[each.answer])}"


def terminal_texts(result: NoiseCurve) -> Iterator[Text]:
    for each in result.mistyped[:MAX_TERMINAL_TEXTS]:
        line = Text(f"{100 * each.rate:g} %, {_turn(result, each)}: ", style="bold")
        yield line.append_text(rich_diff(visible(each.text), visible(each.typed)))


def html_texts(result: NoiseCurve) -> Markup:
    rows = Markup("")
    for each in result.mistyped:
        text = Markup(html_diff(each.text, each.typed))
        cells = in_tags("td", (f"{100 * each.rate:g} %", _turn(result, each)))
        rows += Markup('<tr>{}<td class="text">{}</td></tr>').format(cells, text)
    table = Markup(
        '<div class="wide" tabindex="0"><table class="texts"><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    )
    return table.format(in_tags("th", ("rate", "class", "text")), rows)
