"""Texts with coloured tokens in a terminal and as HTML without a script: row by row, under the model's answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING

from markupsafe import Markup, escape
from rich.text import Text
from ssmscope.render.colours import CIVIDIS, STEPS, ink, ramp, shade_style, signed_shades, signed_style, template_text
from ssmscope.render.numbers import format_probability, number
from ssmscope.render.series import svg
from ssmscope.render.tokens import spell_tokens, unbroken, visible

if TYPE_CHECKING:
    from ssmscope.render.blocks import TokenRow, TokenRows, TokenText

MAX_TERMINAL_TEXTS, MAX_PAGE_TEXTS = 40, 200
MAX_COLOURED_TOKENS, MAX_COLOURED_ROWS = 400, 12
MAX_PAGE_TOKENS = 2000
MIN_REACH = 8
"""Smallest number of tokens shown on each side of a marked token of a long text."""


def row_kinds(block: TokenRows) -> list[bool]:
    """Return the kinds of rows that occur, signed ones (True) first."""
    return sorted({row.signed for text in block.texts for row in text.rows}, reverse=True)


def scale_ends(block: TokenRows, signed: bool) -> tuple[str, str]:
    """Return the names of the two ends of the colour scale."""
    return block.around if signed else ("lowest", "highest")


def windows(text: TokenText, most: int) -> list[int]:
    """Return the positions of a text that are shown, at most `most`: all, or of a longer one windows around the marked
    tokens, the highest first, and its end."""
    length = len(text.tokens)
    marked = [at for rank in zip_longest(*(row.marked for row in text.rows)) for at in rank if at is not None]
    marked = [at for at in dict.fromkeys(marked) if at < length - most // 2] if length > most else []
    shown = set(range(max(length - most // 2, 0), length))
    reach = max(most // (4 * len(marked)), MIN_REACH) if marked else 0
    for at in marked:
        around = range(max(at - reach, 0), min(at + reach, length))
        shown |= {*around} if len(shown | {*around}) <= most else set()
    rest = [at for at in reversed(range(length)) if at not in shown]
    return sorted(shown | {*rest[: most - len(shown)]})


def window_note(text: TokenText, most: int) -> str:
    """Say which part of a long text is shown."""
    shown, length = len(windows(text, most)), len(text.tokens)
    if shown == length:
        return ""
    around = any(row.marked for row in text.rows)
    return f"{shown:,} of {length:,} tokens, the end" + " and those around underlined ones" * around


def cut_note(shown: int, every: int, what: str) -> str:
    return f"the first {shown:,} of {every:,} {what}; the files hold all" if shown < every else ""


# ---- in a terminal


def terminal(block: TokenRows, colours: bool) -> Iterator[Text]:
    """Yield, for each text, the answer and, on a terminal with 256 colours, its tokens in the colours of each row."""
    if colours and any(_written_out(text, block.first) for text in block.texts):
        yield _terminal_legend(block)
    for at, text in enumerate(block.texts[:MAX_TERMINAL_TEXTS]):
        if at:
            yield Text("")
        heading = Text.assemble((f"{at}  ", "dim"), ("answer ", "dim"), (f"“{visible(text.answer)}”", "bold"))
        heading.append(f" ({said})" if (said := format_probability(text.probability)) else "")
        yield heading.append(f"   {text.about}" if text.about else "", style="dim")
        for row in text.rows[: block.first] if colours and _written_out(text, block.first) else ():
            if row.name:
                yield Text(f"{in_line(row.name)}   {row.extent}", style="dim")
            yield _coloured(row, text)
    if rest := cut_note(MAX_TERMINAL_TEXTS, len(block.texts), "texts"):
        yield Text(rest, style="dim")


def _written_out(text: TokenText, first: int | None) -> bool:
    few = len(text.tokens) <= MAX_COLOURED_TOKENS and 0 < len(text.rows[:first]) <= MAX_COLOURED_ROWS
    return few and text.pixels is None


def in_line(name: str) -> str:
    """Return the name of a row, which may have two lines, in one."""
    return visible(" · ".join(name.splitlines()))


def _terminal_legend(block: TokenRows) -> Text:
    legend = Text()
    for signed in row_kinds(block):
        low, high = scale_ends(block, signed)
        legend.append(f"{low} ", style="dim")
        for colour in signed_shades()[::3] if signed else ramp(CIVIDIS, 12):
            legend.append(" ", style=f"on {colour}")
        legend.append(f" {high}   ", style="dim")
    return legend.append("underlined", style="bold underline").append(f": {block.marked}", style="dim")


def _coloured(row: TokenRow, text: TokenText) -> Text:
    """Return a row of tokens in their colours; zero has the terminal's own background."""
    palette, line, kept = signed_shades() if row.signed else ramp(CIVIDIS), Text(), {*row.marked, *row.against}

    def style(shade: int) -> str:
        blank = shade < 0 or (row.signed and shade == STEPS)
        return "" if blank else f"{ink(palette[shade])} on {palette[shade]}"

    if row.state is not None:
        line.append("state", style=f"italic {style(row.state_shade)}").append("  ")
    for at, ((gap, token), shade) in enumerate(zip(spell_tokens(text.tokens, text.words), row.shades().tolist())):
        names = ["bold underline"] * (at in kept) + ["dim"] * (shade < 0)
        names += ["italic"] * (text.span is not None and text.span[0] <= at < text.span[1])
        line.append(" " if gap else "").append("▸" if at == row.query else "")
        line.append(token, style=" ".join([*names, style(shade)]).strip())
    return line


# ---- as HTML


def html(block: TokenRows) -> Markup:
    """Return the legend and a section per text; images are left to the picture."""
    texts = [(at, text) for at, text in enumerate(block.texts[:MAX_PAGE_TEXTS]) if text.pixels is None]
    if not texts:
        return Markup("")
    sections = Markup("").join(_section(at, text) for at, text in texts)
    rest = _note(cut_note(MAX_PAGE_TEXTS, len(block.texts), "texts"))
    return Markup('<div class="texts">{}{}{}</div>').format(legend(block), sections, rest)


def _note(text: str) -> Markup:
    return Markup('<p class="note">{}</p>').format(text) if text else Markup("")


def legend(block: TokenRows) -> Markup:
    bar = Markup('<span class="scale {}">{} <i></i> {}</span>')
    bars = [bar.format("around" if signed else "upward", *scale_ends(block, signed)) for signed in row_kinds(block)]
    said = Markup('<span>{}</span><span><b class="kept">underlined</b> {}</span>')
    said += Markup('<span><i class="special">slanted</i> special tokens</span>')
    return Markup('<p class="legend">{}{}</p>').format(Markup("").join(bars), said.format(block.name, block.marked))


def answer(at: int, said: str, probability: float, about: str) -> Markup:
    """Return the line above a text: its number, the model's answer, further remarks."""
    line = Markup('<p class="answer"><span class="count">{}</span> answer <b dir="auto">“{}”</b> {}')
    after = Markup('<span class="about">{}</span></p>').format(unbroken(about))
    return line.format(at, visible(said), format_probability(probability)) + after


def _section(at: int, text: TokenText) -> Markup:
    titles = _titles(text)
    rows = Markup("").join(_row(row, text, titles) for row in text.rows)
    rows = rows if text.series is None else svg(text.series[windows(text, MAX_PAGE_TOKENS)]) + rows
    shown = answer(at, text.answer, text.probability, text.about)
    rest = _note(f"{said}; the files hold all" if (said := window_note(text, MAX_PAGE_TOKENS)) else "")
    return Markup("<section>{}{}{}</section>").format(shown, rows, rest)


def _row(row: TokenRow, text: TokenText, titles: Mapping[int, Markup]) -> Markup:
    remark = Markup(' <span class="remark">{}</span>').format(row.remark) if row.remark else ""
    head = Markup('<p class="row"><b>{}</b> {}{}</p>').format(in_line(row.name), row.extent, remark)
    names = "tokens" if text.series is None else "tokens steps"
    return head + Markup('<p class="{}">{}</p>').format(names, tokens(row, text, titles))


def tokens(row: TokenRow, text: TokenText, titles: Mapping[int, Markup] | None = None) -> Markup:
    """Return the running text with every token in its colour."""
    pieces = [] if row.state is None else [_state(row)]
    places = {**dict.fromkeys(row.against, "against"), **dict.fromkeys(row.marked, "kept")}
    spelled, shades, before = spell_tokens(text.tokens, text.words), row.shades().tolist(), -1
    for at in windows(text, MAX_PAGE_TOKENS):
        (gap, token), shade = spelled[at], shades[at]
        pieces += [" ⋯ "] * (at > before + 1)
        before = at
        names = [] if row.signed or shade < 0 else [f"v{shade}"]
        names += filter(None, [places.get(at)])
        names += ["special"] * (text.words[at] is None) + ["out"] * (shade < 0)
        names += ["within"] * (text.span is not None and text.span[0] <= at < text.span[1])
        names += ["query"] * (at == row.query)
        level = f' data-l="{shade - STEPS}"' if row.signed and shade >= 0 else ""
        title = f' title="{titles[at]}"' if titles else ""
        space = " " if gap else ""
        if text.series is not None:
            space, token = "", ""
        pieces.append(f'{space}<span class="{" ".join(names)}"{level}{title}>{escape(token)}</span>')
        pieces += ["<wbr>"] * (text.series is None)
    return Markup("".join(pieces))


def _state(row: TokenRow) -> str:
    colour = f'" data-l="{row.state_shade - STEPS}' if row.signed else f" v{row.state_shade}"
    return f'<i class="state{colour}" title="{number(row.state or 0.0, significant=6)}">state</i> '


def _titles(text: TokenText) -> dict[int, Markup]:
    """Return the tooltip of each token: its score in every row, and its rank if it is underlined."""
    ranks = [{at: rank for rank, at in enumerate(row.marked, start=1)} for row in text.rows]
    titles = {}
    for at in windows(text, MAX_PAGE_TOKENS):
        lines = [f"position {at}" + (", special token" if text.words[at] is None else "")]
        for row, rank in zip(text.rows, ranks):
            place = f" (rank {rank[at]})" if at in rank else ""
            lines.append(f"{in_line(row.name)}: {number(float(row.scores[at]), significant=6)}{place}")
        titles[at] = Markup("&#10;").join(lines)
    return titles


def style() -> str:
    return shade_style() + signed_style() + template_text("tokens.css")
