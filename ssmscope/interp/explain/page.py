"""Explanations as HTML: the text in every method's colours, a token's scores when it is pointed at, no script."""

from __future__ import annotations

from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING

from ssmscope.interp.explain import shades as explained
from ssmscope.show import signed
from ssmscope.show.tokens import BLUES, BLUES_ON_DARK, ink, ramp, visible, written

if TYPE_CHECKING:
    from ssmscope.interp.explain.result import Attribution, ExplainedText, Explanation

TOKENS = 2000
"""How many tokens of a text are shown; the files hold all."""


def fragment(result: Explanation) -> str:
    """A self-contained piece of HTML with every text of an explanation."""
    sections = "".join(_section(number, text, result.top) for number, text in enumerate(result))
    said = "".join(f'<p class="legend">{escape(visible(line))}</p>' for line in explained.baselines(result))
    return f'<div class="ssmscope-explain"><style>{_style()}</style>{_legend(result)}{sections}{said}</div>'


def _legend(result: Explanation) -> str:
    kinds = [each.signed for text in result.texts[:1] for each in text.attributions]
    scales = '<span class="scale around">against <i></i> for what is explained</span>' if any(kinds) else ""
    scales += "" if all(kinds) else '<span class="scale upward">lowest <i></i> highest</span>'
    return (
        f'<p class="legend">{scales}<span>each method in its own range</span>'
        f'<span><b class="kept">underlined</b> the top {result.top}</span>'
        '<span><span class="special">slanted</span> special tokens, in the range or at its end</span></p>'
    )


def _section(number: int, text: ExplainedText, top: int) -> str:
    titles = _titles(text, top)
    rows = "".join(_row(each, text, top, titles) for each in text.attributions)
    cut = f'<p class="cut">the first {TOKENS} of {len(text)} tokens</p>' if len(text) > TOKENS else ""
    return (
        f'<section><p class="answer"><span class="number">{number}</span> '
        f"answer <b>“{escape(visible(text.answer))}”</b> p = {text.probability:.3f}"
        f'<span class="about">{escape(explained.about(text))}</span></p>{rows}{cut}</section>'
    )


def _row(each: Attribution, text: ExplainedText, top: int, titles: list[str]) -> str:
    doubt = explained.doubt(each)
    of = "the largest score" if each.error is not None else "f(x) − f(baseline)"
    of = "" if doubt.endswith("checked") else f" of {of}"
    warning = f' <span class="doubt">{escape(doubt)}{of}</span>' if doubt else ""
    steps = f" · {each.steps} steps" if each.steps is not None else ""
    return (
        f'<p class="method"><b>{escape(visible(each.method))}</b> {escape(explained.limits(each, text))}{steps}'
        f'{warning}</p><p class="tokens">{_tokens(each, text, top, titles)}</p>'
    )


def _titles(text: ExplainedText, top: int) -> list[str]:
    """What a token shows when it is pointed at: its score by every method, and its rank where it is among the top."""
    ranks = [{at: rank for rank, at in enumerate(text.top(each, top), start=1)} for each in text.attributions]
    titles = []
    for position in range(min(len(text), TOKENS)):
        lines = [f"position {position}" + (", special token" if text.words[position] is None else "")]
        for each, rank in zip(text.attributions, ranks, strict=True):
            place = f" (rank {rank[position]})" if position in rank else ""
            lines.append(f"{escape(visible(each.method), quote=True)}: {each.scores[position]:.6g}{place}")
        titles.append("&#10;".join(lines))
    return titles


def _tokens(each: Attribution, text: ExplainedText, top: int, titles: list[str]) -> str:
    kept = set(text.top(each, top))
    shades = explained.levels(each, text)
    pieces = []
    for position, (gap, token) in enumerate(written(text.tokens, text.words)[:TOKENS]):
        level = int(shades[position])
        names = f"s{level + signed.STEPS}" if each.signed else f"v{level}"
        names += " kept" if position in kept else ""
        names += " special" if text.words[position] is None else ""
        pieces.append(
            f'{" " if gap else ""}<span class="{names}" title="{titles[position]}">{escape(token)}</span><wbr>'
        )
    return "".join(pieces)


@lru_cache(maxsize=1)
def _style() -> str:
    light = _rules(signed.SIGNED, BLUES)
    dark = _rules(signed.SIGNED_ON_DARK, BLUES_ON_DARK)
    return _STYLE.replace("LIGHT;", light).replace("DARK;", dark)


def _rules(around: tuple[str, ...], upward: tuple[str, ...]) -> str:
    prefix = ".ssmscope-explain"
    shades = [("s", signed.shades(around)), ("v", ramp(upward))]
    rules = [
        f"{prefix} .{kind}{i} {{ background: {colour}; color: {ink(colour)} }}"
        for kind, colours in shades
        for i, colour in enumerate(colours)
    ]
    rules += [
        f"{prefix} .{name} i {{ background: linear-gradient(90deg, {', '.join(stops)}) }}"
        for name, stops in (("around", around), ("upward", upward))
    ]
    return "\n".join(rules)


_STYLE = """
.ssmscope-explain { --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #ffffff; --mark: #d1540a;
  color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
LIGHT;
@media (prefers-color-scheme: dark) {
.ssmscope-explain { --ink: #e6edf3; --soft: #9da7b3; --line: #30363d; --paper: #0f141a; --mark: #ff9f4a; }
DARK;
}
.ssmscope-explain p { margin: 0 0 8px; }
.ssmscope-explain .legend { display: flex; flex-wrap: wrap; gap: 4px 28px; color: var(--soft); font-size: 13px; }
.ssmscope-explain .scale i { display: inline-block; width: 120px; height: 10px; margin: 0 3px; border-radius: 2px; }
.ssmscope-explain section { border-top: 1px solid var(--line); padding: 14px 0 12px; }
.ssmscope-explain .answer, .ssmscope-explain .method, .ssmscope-explain .cut { color: var(--soft); font-size: 13px;
  font-variant-numeric: tabular-nums; }
.ssmscope-explain .answer b { color: var(--ink); font-size: 15px; overflow-wrap: anywhere; }
.ssmscope-explain .about { margin-left: 24px; overflow-wrap: anywhere; }
.ssmscope-explain .number { display: inline-block; min-width: 1.6em; font-weight: 600; }
.ssmscope-explain .method { margin: 10px 0 1px; }
.ssmscope-explain .method b { color: var(--ink); display: inline-block; min-width: 11em; }
.ssmscope-explain .doubt { color: var(--mark); margin-left: 12px; }
.ssmscope-explain .tokens { line-height: 2; overflow-wrap: anywhere; }
.ssmscope-explain .tokens span { padding: 2px 3px; margin: 0 1px; border-radius: 3px; white-space: pre-wrap;
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.ssmscope-explain .special { font-style: italic; }
.ssmscope-explain .kept { font-weight: 700; box-shadow: 0 3px var(--ink); }
.ssmscope-explain b.kept { color: var(--ink); padding: 2px 3px; }
"""
