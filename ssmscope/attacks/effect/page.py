"""Two texts as HTML, before and after a change: tokens in colour, bars of attention."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from ssmscope.attacks.effect.figure import colours, span
from ssmscope.render.tokens import shade_style, shorten, visible, written

if TYPE_CHECKING:
    from ssmscope.attacks.effect.result import AttackEffect, Side

TOKENS = 1000
"""How many tokens of each text are shown; the files hold all."""
TALLEST = 36
"""The tallest bar, in pixels."""


def texts(result: AttackEffect) -> str:
    """Both texts, and the caption of the picture below them."""
    sides = (("before", result.before), ("after", result.after))
    scale = max(float(side.mean_attention.max()) for _, side in sides) or 1.0
    sections = (_section(*side, levels, scale, result) for side, levels in zip(sides, colours(result)))
    caption = (
        "Relative distance of the vectors at the tokens of both texts: the layers’ inputs, and what the head reads"
    )
    return f'<div class="effect">{_legend(result)}{"".join(sections)}<p class="answer">{caption}</p></div>'


def _legend(result: AttackEffect) -> str:
    return (
        f'<p class="legend"><span class="scale">lowest <i></i> highest retention, {span(result)}</span>'
        '<span><b class="changed">underlined</b> changed tokens</span>'
        "<span>bars: share of the last position’s attention</span>"
        '<span><span class="special">grey</span> special tokens, outside the scale</span></p>'
    )


def _section(name: str, side: Side, levels: Sequence[int], scale: float, result: AttackEffect) -> str:
    tooltips = _tooltips(side, result)
    tokens = written(side.text.tokens, side.text.words)
    columns = []
    for at, (_, token) in enumerate(tokens[:TOKENS]):
        gap = at + 1 < len(tokens) and tokens[at + 1][0]
        shade = "special" if levels[at] < 0 else f"v{levels[at]}"
        changed = " changed" if side.changed[at] else ""
        height = TALLEST * float(side.mean_attention[at]) / scale
        columns.append(
            f'<span class="column{" gap" if gap else ""}" title="{tooltips[at]}"><span class="{shade}{changed}">'
            f'{escape(shorten(token, 40))}</span><i class="bar{changed}" style="height:{height:.1f}px"></i></span>'
        )
    cut = f"<p>the first {TOKENS} of {len(side)} tokens</p>" if len(side) > TOKENS else ""
    on = f"{100 * side.on_changed.mean():.1f} % of the attention on changed tokens" if side.changed.any() else ""
    return (
        f'<section><p class="answer"><span class="side">{name}</span> answer '
        f"<b>“{escape(visible(side.text.answer))}”</b> p = {side.text.probability:.3f}"
        f'<span class="about">{on}</span></p><div class="columns">{"".join(columns)}</div>{cut}</section>'
    )


def _tooltips(side: Side, result: AttackEffect) -> list[str]:
    """What a token shows when it is pointed at."""
    tooltips = []
    for at in range(min(len(side), TOKENS)):
        lines = [f"position {at}" + (", changed" if side.changed[at] else "")]
        lines += [f"attention {100 * side.mean_attention[at]:.2f} %", f"retention {side.text.mean[at]:.6g}"]
        lines += [
            f"layer {layer}: attention {100 * side.attention[row, at]:.2f} %, retention {side.text.scores[row, at]:.6g}"
            for row, layer in enumerate(result.layers)
        ]
        tooltips.append("&#10;".join(lines))
    return tooltips


STYLE = f"""{shade_style()}
.ssmscope .effect section {{ border-top: 1px solid var(--line); padding: 14px 0 16px; }}
.ssmscope .effect .answer {{ color: var(--soft); font-size: 13px; }}
.ssmscope .effect .answer b {{ color: var(--ink); font-size: 15px; overflow-wrap: anywhere; }}
.ssmscope .effect .side {{ display: inline-block; min-width: 4em; font-weight: 600; }}
.ssmscope .effect .about {{ margin-left: 24px; }}
.ssmscope .effect .columns {{ display: flex; flex-wrap: wrap; align-items: flex-start; gap: 14px 1px; }}
.ssmscope .effect .column {{ display: flex; flex-direction: column; align-items: center; min-width: 12px; }}
.ssmscope .effect .column.gap {{ margin-right: 5px; }}
.ssmscope .effect .column > span {{ padding: 2px 4px; margin-bottom: 4px; white-space: pre; border-radius: 3px; }}
.ssmscope .effect .special {{ color: var(--soft); font-style: italic; }}
.ssmscope .effect .changed {{ font-weight: 700; box-shadow: inset 0 -3px var(--mark); }}
.ssmscope .effect b.changed {{ color: var(--ink); padding: 2px 3px; }}
.ssmscope .effect .bar {{ display: block; width: 12px; background: #4f97cb; }}
.ssmscope .effect .bar.changed {{ background: var(--mark); box-shadow: none; }}
"""
