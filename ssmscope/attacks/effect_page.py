"""What a change of a text did, as HTML: both texts in colour, bars of attention, the distances, a table; no script."""

from __future__ import annotations

import base64
import io
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING

from ssmscope.attacks.effect_figure import colours, draw_distances, span
from ssmscope.interp.views.tokens import BLUES, BLUES_ON_DARK, ink, ramp, shorten, visible, written

if TYPE_CHECKING:
    import numpy as np

    from ssmscope.attacks.effect import AttackEffect, Side

TOKENS = 1000
"""How many tokens of each text are shown; the files hold all."""
TALLEST = 36
"""The tallest bar, in pixels."""


def fragment(result: AttackEffect) -> str:
    """A self-contained piece of HTML."""
    scale = max(float(side.mean_attention.max()) for side in (result.before, result.after)) or 1.0
    sections = "".join(
        _section(name, side, levels, scale, result)
        for name, side, levels in zip(("before", "after"), (result.before, result.after), colours(result))
    )
    buffer = io.BytesIO()
    draw_distances(result).savefig(buffer, format="png", dpi=150)
    picture = base64.b64encode(buffer.getvalue()).decode()
    frame = result.summary().round(4)
    for name in ("first", "peak_at"):  # pandas' na_rep passes these over
        frame[name] = frame[name].astype(object).where(frame[name].notna(), "")
    return (
        f'<div class="ssmscope-effect"><style>{_style()}</style>{_legend(result)}{sections}'
        '<section><p class="answer">Relative distance of the vectors at the tokens of both texts: the layers’ inputs, '
        f'and what the head reads</p><img alt="distance along the text" src="data:image/png;base64,{picture}">'
        f'<div class="wide">{frame.to_html(index=False, border=0, na_rep="")}</div></section></div>'
    )


def _legend(result: AttackEffect) -> str:
    return (
        f'<p class="legend"><span>{escape(result.answer_name)}; {escape(result.changed_name)}</span>'
        f'<span class="scale">lowest <i></i> highest retention, {span(result)}</span>'
        '<span><b class="changed">underlined</b> changed tokens</span>'
        "<span>bars: share of the last position’s attention</span>"
        '<span><span class="special">grey</span> special tokens, outside the scale</span></p>'
    )


def _section(name: str, side: Side, levels: np.ndarray, scale: float, result: AttackEffect) -> str:
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


@lru_cache(maxsize=1)
def _style() -> str:
    return _STYLE.replace("LIGHT;", _shade_rules(BLUES)).replace("DARK;", _shade_rules(BLUES_ON_DARK))


def _shade_rules(stops: tuple[str, ...]) -> str:
    prefix = ".ssmscope-effect"
    rules = [f"{prefix} .v{i} {{ background: {c}; color: {ink(c)} }}" for i, c in enumerate(ramp(stops))]
    return "\n".join([*rules, f"{prefix} .scale i {{ background: linear-gradient(90deg, {', '.join(stops)}) }}"])


_STYLE = """
.ssmscope-effect { --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #ffffff; --mark: #d1540a;
  --bar: #4f97cb; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
LIGHT;
@media (prefers-color-scheme: dark) {
.ssmscope-effect { --ink: #e6edf3; --soft: #9da7b3; --line: #30363d; --paper: #0f141a; --mark: #ff9f4a; }
DARK;
}
.ssmscope-effect p { margin: 0 0 10px; }
.ssmscope-effect img { max-width: 100%; background: #fff; }
.ssmscope-effect .legend { display: flex; flex-wrap: wrap; gap: 4px 28px; color: var(--soft); font-size: 13px; }
.ssmscope-effect .scale i { display: inline-block; width: 120px; height: 10px; margin: 0 3px; border-radius: 2px; }
.ssmscope-effect section { border-top: 1px solid var(--line); padding: 14px 0 16px; }
.ssmscope-effect .answer { color: var(--soft); font-size: 13px; }
.ssmscope-effect .answer b { color: var(--ink); font-size: 15px; overflow-wrap: anywhere; }
.ssmscope-effect .side { display: inline-block; min-width: 4em; font-weight: 600; }
.ssmscope-effect .about { margin-left: 24px; }
.ssmscope-effect .columns { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 14px 1px; }
.ssmscope-effect .column { display: flex; flex-direction: column; align-items: center; min-width: 12px; }
.ssmscope-effect .column.gap { margin-right: 5px; }
.ssmscope-effect .column > span { padding: 2px 4px; margin-bottom: 4px; white-space: pre; border-radius: 3px; }
.ssmscope-effect .special { color: var(--soft); font-style: italic; }
.ssmscope-effect .changed { font-weight: 700; box-shadow: inset 0 -3px var(--mark); }
.ssmscope-effect b.changed { color: var(--ink); padding: 2px 3px; }
.ssmscope-effect .bar { display: block; width: 12px; background: var(--bar); }
.ssmscope-effect .bar.changed { background: var(--mark); box-shadow: none; }
.ssmscope-effect .wide { overflow-x: auto; }
.ssmscope-effect table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
.ssmscope-effect th, .ssmscope-effect td { padding: 3px 12px 3px 0; text-align: right;
  border-bottom: 1px solid var(--line); }
"""
