"""Answers by layer as HTML: layers × tokens with all numbers in tooltips, no script, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.interp.views.tokens import BLUES, BLUES_ON_DARK, SHADES, ink, ramp, shorten, visible

if TYPE_CHECKING:
    from ssmscope.probes.trajectory import LensedText, Trajectory

CELLS = 20_000
"""How many cells of a text are shown; the files hold all."""


def fragment(result: Trajectory) -> str:
    """A self-contained piece of HTML with every text of the trajectory."""
    from ssmscope.probes.trajectory import STATISTICS

    shown = max(CELLS // (result.layers + 1), 1)
    high = 1.0 if result.statistic.endswith("probability") else _highest(result)
    legend = (
        f'<p class="legend"><span>{escape(result.lens)}</span>'
        f'<span class="scale">0 <i></i> {high:.3g} {escape(STATISTICS[result.statistic])}</span>'
        "<span>layer i reads what enters block i, 0 the embeddings</span>"
        '<span><b class="settled">outlined</b> from here on the final answer leads</span></p>'
    )
    if result.positions == "last":
        columns = [(text, 0, f"text {number}") for number, text in enumerate(result.texts[:shown], start=1)]
        sections = _section(result, columns, high, len(result.texts), "texts")
    else:
        sections = "".join(
            _section(
                result, [(text, at, "") for at in range(min(len(text.positions), shown))], high, len(text), "tokens"
            )
            for text in result.texts
        )
    return f'<div class="ssmscope-lens"><style>{_style()}</style>{legend}{sections}</div>'


def _highest(result: Trajectory) -> float:
    values = np.concatenate([getattr(text, result.statistic).ravel() for text in result.texts])
    return max(float(np.nanmax(values)), 1e-9) if not np.isnan(values).all() else 1.0


def _section(
    result: Trajectory, columns: Sequence[tuple[LensedText, int, str]], high: float, every: int, what: str
) -> str:
    cut = f"<p class='cut'>{len(columns)} of {every} {what}</p>" if len(columns) < every else ""
    lines = []
    for layer in range(result.layers, -1, -1):
        name = "model" if layer == result.layers else str(layer)
        cells = "".join(_cell(result, text, at, layer, high) for text, at, _ in columns)
        lines.append(f"<tr><th>{name}</th>{cells}</tr>")
    tokens = "".join(f"<td>{_token(text, at, label)}</td>" for text, at, label in columns)
    lines.append(f'<tr class="tokens"><th>token</th>{tokens}</tr>')
    return f'<section><div class="wide"><table>{"".join(lines)}</table></div>{cut}</section>'


def _token(text: LensedText, at: int, label: str) -> str:
    token = escape(shorten(visible(text.tokens[text.positions[at]]), 40))
    return f"{label}<br>{token}" if label else token


def _cell(result: Trajectory, text: LensedText, at: int, layer: int, high: float) -> str:
    from ssmscope.probes.trajectory import STATISTICS

    lines = [f"position {text.positions[at]}, layer {layer}" if layer < result.layers else "the model's own answer"]
    for name, meaning in STATISTICS.items():
        value = float(getattr(text, name)[layer, at])
        if not np.isnan(value):
            lines.append(f"{meaning}: {value:.5g}")
    value = float(getattr(text, result.statistic)[layer, at])
    shade = "none" if np.isnan(value) else f"v{round(min(max(value / high, 0.0), 1.0) * (SHADES - 1))}"
    names = [shade, *(["same"] if text.agrees[layer, at] else []), *(["settled"] if text.settled[at] == layer else [])]
    title = escape("\n".join(lines)).replace("\n", "&#10;")
    return f'<td class="{" ".join(names)}" title="{title}">{escape(shorten(visible(text.answers[layer][at]), 24))}</td>'


@lru_cache(maxsize=1)
def _style() -> str:
    return _STYLE.replace("LIGHT;", _shade_rules(BLUES)).replace("DARK;", _shade_rules(BLUES_ON_DARK))


def _shade_rules(stops: Sequence[str]) -> str:
    prefix = ".ssmscope-lens"
    rules = [f"{prefix} .v{i} {{ background: {c}; color: {ink(c)} }}" for i, c in enumerate(ramp(stops))]
    return "\n".join([*rules, f"{prefix} .scale i {{ background: linear-gradient(90deg, {', '.join(stops)}) }}"])


_STYLE = """
.ssmscope-lens { --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #ffffff; --mark: #d1540a;
  color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
LIGHT;
@media (prefers-color-scheme: dark) {
.ssmscope-lens { --ink: #e6edf3; --soft: #9da7b3; --line: #30363d; --paper: #0f141a; --mark: #ff9f4a; }
DARK;
}
.ssmscope-lens .legend { display: flex; flex-wrap: wrap; gap: 4px 28px; color: var(--soft); font-size: 13px; }
.ssmscope-lens .scale i { display: inline-block; width: 120px; height: 10px; margin: 0 3px; border-radius: 2px; }
.ssmscope-lens section { border-top: 1px solid var(--line); padding: 14px 0 16px; }
.ssmscope-lens .wide { overflow-x: auto; }
.ssmscope-lens table { border-collapse: separate; border-spacing: 1px; font-size: 12px; }
.ssmscope-lens th { position: sticky; left: 0; background: var(--paper); color: var(--soft); font-weight: 500;
  padding: 2px 8px 2px 0; text-align: right; }
.ssmscope-lens td { padding: 2px 5px; text-align: center; white-space: pre; min-width: 2.5em; }
.ssmscope-lens .tokens td { font-style: italic; vertical-align: top; }
.ssmscope-lens .same { font-weight: 700; }
.ssmscope-lens .settled { box-shadow: inset 0 0 0 2px var(--mark); }
.ssmscope-lens b.settled { padding: 1px 5px; font-weight: 500; }
.ssmscope-lens .cut { color: var(--soft); font-size: 13px; }
"""
