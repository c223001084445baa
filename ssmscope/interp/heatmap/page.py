"""Scored tokens as HTML: coloured text with tooltips, the layers beneath, no script, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING

from ssmscope.show.tokens import (
    BLUES,
    BLUES_ON_DARK,
    bounds,
    ink,
    numbers,
    ramp,
    shades,
    shorten,
    visible,
    written,
)

if TYPE_CHECKING:
    import numpy as np

    from ssmscope.interp.heatmap.result import ScoredText, SelectionHeatmap

LAYER_TOKENS = 2000
"""How many tokens of a text are shown layer by layer; the average is shown for all, and the files hold
all."""


def fragment(heatmap: SelectionHeatmap) -> str:
    """A self-contained piece of HTML with every text of the heatmap."""
    sections = "".join(_section(number, text, heatmap) for number, text in enumerate(heatmap, start=1))
    return f'<div class="ssmscope-heatmap"><style>{_style()}</style>{_legend(heatmap)}{sections}</div>'


def _legend(heatmap: SelectionHeatmap) -> str:
    return (
        f'<p class="legend"><span>{escape(heatmap.score_name)} (Baleen, Eq. 10)</span>'
        f"<span>{escape(heatmap.layers_name)}</span>"
        '<span class="scale">lowest <i></i> highest of each row</span>'
        f'<span><b class="kept">underlined</b> rationale, the top {heatmap.size}</span>'
        '<span><span class="special">grey</span> special tokens, outside the scale</span></p>'
    )


def _section(number: int, text: ScoredText, heatmap: SelectionHeatmap) -> str:
    levels = shades(text.mean[None], text.special)[0]
    tooltips = _tooltips(text, heatmap)
    shown = min(len(text), LAYER_TOKENS)
    cut = f" of the first {shown} of {len(text)} tokens" if shown < len(text) else ""
    single = len(heatmap.layers) == 1
    layers = "" if single else _columns(text, heatmap, levels, shown, cut) + _each(text, heatmap, shown, cut)
    return (
        f'<section><p class="answer"><span class="number">{number}</span> '
        f"answer <b>“{escape(visible(text.answer))}”</b> p = {text.probability:.3f}"
        f'<span class="range">{heatmap.score} {bounds(text.mean, text.special)}</span></p>'
        f'<p class="tokens">{_tokens(text, levels, tooltips)}</p>{layers}</section>'
    )


def _tooltips(text: ScoredText, heatmap: SelectionHeatmap) -> list[str]:
    rank = {position: place for place, position in enumerate(text.rationale, start=1)}
    names = ["mean", *(f"layer {layer}" for layer in heatmap.layers)]
    tooltips = []
    for position in range(len(text)):
        lines = [f"position {position}"]
        if text.words[position] is None:
            lines.append("special token")
        if position in rank:
            lines.append(f"rationale, rank {rank[position]}")
        values = [text.mean[position], *text.scores[:, position]]
        lines += [f"{name}: {value:.6g}" for name, value in zip(names, values, strict=True)]
        tooltips.append("&#10;".join(lines))
    return tooltips


def _tokens(text: ScoredText, levels: np.ndarray, tooltips: Sequence[str] = (), shown: int | None = None) -> str:
    """The text in its flow, every token in its shade."""
    kept = set(text.rationale)
    pieces = []
    for position, (gap, token) in enumerate(written(text.tokens, text.words)[:shown]):
        title = f' title="{tooltips[position]}"' if tooltips else ""
        names = _classes(levels[position], position in kept)
        pieces.append(f'{" " if gap else ""}<span class="{names}"{title}>{escape(token)}</span><wbr>')
    return "".join(pieces)


def _columns(text: ScoredText, heatmap: SelectionHeatmap, levels: np.ndarray, shown: int, cut: str) -> str:
    """Layers × tokens: under every token a cell per layer, the whole wrapped as the text is."""
    by_layer = shades(text.scores, text.special)
    kept = set(text.rationale)
    columns = []
    tokens = written(text.tokens, text.words)
    for position, (_, token) in enumerate(tokens[:shown]):
        gap = position + 1 < len(tokens) and tokens[position + 1][0]
        cells = "".join(f'<i class="{_classes(level)}"></i>' for level in by_layer[:, position])
        names = _classes(levels[position], position in kept)
        columns.append(
            f'<span class="column{" gap" if gap else ""}">'
            f'<span class="{names}">{escape(shorten(token, 40))}</span>{cells}</span>'
        )
    size = "thin" if len(heatmap.layers) > 12 else "thick"
    return (
        f"<details{' open' if shown <= 120 else ''}><summary>Layers × tokens{cut}: under each token layers "
        f"{numbers(heatmap.layers)} from top to bottom</summary>"
        f'<div class="columns {size}">{"".join(columns)}</div></details>'
    )


def _each(text: ScoredText, heatmap: SelectionHeatmap, shown: int, cut: str) -> str:
    """A fold per layer with the text coloured by that layer alone."""
    folds = "".join(
        f"<details><summary>Layer {layer} <small>{bounds(scores, text.special)}</small></summary>"
        f'<p class="tokens">{_tokens(text, levels, shown=shown)}</p></details>'
        for layer, scores, levels in zip(heatmap.layers, text.scores, shades(text.scores, text.special), strict=True)
    )
    return f'<details><summary>Layer by layer{cut}</summary><div class="folds">{folds}</div></details>'


def _classes(level: int, kept: bool = False) -> str:
    return ("special" if level < 0 else f"v{level}") + (" kept" if kept else "")


@lru_cache(maxsize=1)
def _style() -> str:
    return _STYLE.replace("LIGHT;", _shade_rules(BLUES)).replace("DARK;", _shade_rules(BLUES_ON_DARK))


def _shade_rules(stops: Sequence[str]) -> str:
    prefix = ".ssmscope-heatmap"
    rules = [f"{prefix} .v{i} {{ background: {c}; color: {ink(c)} }}" for i, c in enumerate(ramp(stops))]
    return "\n".join([*rules, f"{prefix} .scale i {{ background: linear-gradient(90deg, {', '.join(stops)}) }}"])


_STYLE = """
.ssmscope-heatmap { --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #ffffff; --mark: #d1540a;
  --empty: #eceff2; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
LIGHT;
@media (prefers-color-scheme: dark) {
.ssmscope-heatmap { --ink: #e6edf3; --soft: #9da7b3; --line: #30363d; --paper: #0f141a; --mark: #ff9f4a;
  --empty: #22282f; }
DARK;
}
.ssmscope-heatmap p { margin: 0 0 10px; }
.ssmscope-heatmap .legend { display: flex; flex-wrap: wrap; gap: 4px 28px; color: var(--soft);
  font-size: 13px; }
.ssmscope-heatmap .scale i { display: inline-block; width: 120px; height: 10px; margin: 0 3px;
  border-radius: 2px; }
.ssmscope-heatmap section { border-top: 1px solid var(--line); padding: 14px 0 16px; }
.ssmscope-heatmap .answer, .ssmscope-heatmap summary { color: var(--soft); font-size: 13px; }
.ssmscope-heatmap .answer b { color: var(--ink); font-size: 15px; overflow-wrap: anywhere; }
.ssmscope-heatmap .number { display: inline-block; min-width: 1.6em; font-weight: 600; }
.ssmscope-heatmap .range { margin-left: 24px; font-variant-numeric: tabular-nums; }
.ssmscope-heatmap .tokens { line-height: 2; overflow-wrap: anywhere; }
.ssmscope-heatmap .tokens span { padding: 2px 3px; margin: 0 1px; border-radius: 3px; white-space: pre-wrap;
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.ssmscope-heatmap .special { color: var(--soft); font-style: italic; }
.ssmscope-heatmap .kept { font-weight: 700; box-shadow: inset 0 -3px var(--mark); }
.ssmscope-heatmap b.kept { color: var(--ink); padding: 2px 3px; }
.ssmscope-heatmap summary { cursor: pointer; padding: 3px 0; }
.ssmscope-heatmap summary small { margin-left: 12px; font-variant-numeric: tabular-nums; }
.ssmscope-heatmap .folds { margin-left: 18px; }
.ssmscope-heatmap .columns { display: flex; flex-wrap: wrap; gap: 12px 1px; padding: 8px 0; font-size: 13px; }
.ssmscope-heatmap .column { display: flex; flex-direction: column; min-width: 12px; }
.ssmscope-heatmap .column.gap { margin-right: 5px; }
.ssmscope-heatmap .column span { padding: 1px 4px; margin-bottom: 3px; text-align: center; white-space: pre;
  border-radius: 2px; }
.ssmscope-heatmap .column i { display: block; height: 10px; }
.ssmscope-heatmap .thin i { height: 5px; }
.ssmscope-heatmap .column i.special { background: var(--empty); }
"""
