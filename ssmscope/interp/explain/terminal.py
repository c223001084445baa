"""Explanations in a terminal: the text in the colours of every method, or a table of its top tokens without colour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ssmscope.interp.explain import shades as explained
from ssmscope.show import signed
from ssmscope.show.tokens import CIVIDIS, ink, ramp, shorten, visible, written

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ssmscope.interp.explain.result import Attribution, ExplainedText, Explanation

COLOURED_TOKENS = 400
"""Up to how many tokens a text is written out in colour."""


def terminal_view(result: Explanation, *, coloured: bool) -> Iterator[RenderableType]:
    """Per text the answer, what is explained, the tokens in the colours of every method (where there is colour and the
    text is not long), and a row per method of its range and top tokens.

    `coloured` needs a terminal of 256 colours or more.
    """
    yield Text(visible(result.headline), style="bold")
    if coloured:
        yield _legend(result)
    for number, text in enumerate(result):
        yield Text("")
        heading = Text.assemble((f"{number}  ", "dim"), ("answer ", "dim"), (f"“{visible(text.answer)}”", "bold"))
        heading.append(f" (p = {text.probability:.3f})")
        heading.append(f"   {explained.about(text)}", style="dim")
        yield heading
        if coloured and len(text) <= COLOURED_TOKENS:
            for each in text.attributions:
                yield Text(visible(each.method), style="dim")
                yield _coloured(each, text, result.top)
        yield _table(text, result.top)
    said = explained.baselines(result)
    if said:
        yield Text("")
    yield from (Text(visible(line), style="dim") for line in said)


def _legend(result: Explanation) -> Text:
    kinds = [each.signed for text in result.texts[:1] for each in text.attributions]
    legend = Text()
    if any(kinds):
        legend.append("against ", style="dim")
        for colour in signed.shades()[::3]:
            legend.append(" ", style=f"on {colour}")
        legend.append(" for   ", style="dim")
    if not all(kinds):
        legend.append("lowest ", style="dim")
        for colour in ramp(CIVIDIS, 12):
            legend.append(" ", style=f"on {colour}")
        legend.append(" highest   ", style="dim")
    legend.append("underlined", style="bold underline")
    return legend.append(f": the top {result.top}", style="dim")


def _coloured(each: Attribution, text: ExplainedText, top: int) -> Text:
    colours = signed.shades() if each.signed else ramp(CIVIDIS)
    shift = signed.STEPS if each.signed else 0
    kept = set(text.top(each, top))
    line = Text()
    for position, ((gap, token), level) in enumerate(
        zip(written(text.tokens, text.words), explained.levels(each, text), strict=True)
    ):
        colour = colours[level + shift]
        style = f"{ink(colour)} on {colour}"
        line.append(" " if gap else "")
        line.append(token, style=f"bold underline {style}" if position in kept else style)
    return line


def _table(text: ExplainedText, top: int) -> Table:
    """One row per method: its range, its top tokens with their scores, and whether they add up."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("method", no_wrap=True)
    table.add_column("range", no_wrap=True)
    table.add_column(f"highest {top}")
    doubts = [explained.doubt(each) for each in text.attributions]
    if any(doubts):
        table.add_column("error")
    for each, doubt in zip(text.attributions, doubts, strict=True):
        names = [
            f"{shorten(visible(text.tokens[position]).strip(' '), 40)} {signed.brief(float(each.scores[position]))}"
            for position in text.top(each, top)
        ]
        row = [Text(visible(each.method)), Text(explained.limits(each, text)), Text("  ".join(names))]
        table.add_row(*row, *([Text(doubt)] if any(doubts) else []))
    return table
