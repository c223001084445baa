"""HTML view of answers by layer: layers × tokens with all numbers in tooltips, no script, light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import chain
from typing import TYPE_CHECKING

from ssmscope.probes.lens.lensed_text import STATISTICS, highest, shade
from ssmscope.render.colours import shade_style
from ssmscope.render.tokens import REST, shorten, visible

if TYPE_CHECKING:
    from ssmscope.probes.lens.lensed_text import Column
    from ssmscope.probes.lens.result import Trajectory

MAX_CELLS = 20_000
"""Maximum number of cells shown of a text; the files hold all."""


def fragment(result: Trajectory) -> str:
    """Return every text of the trajectory as HTML, with a legend."""
    high = highest(chain(*result.panels), result.statistic)
    return (
        f'<div class="lensed"><p class="legend"><span>{escape(result.lens)}</span>'
        f'<span class="scale">0 <i></i> {high:.3g} {escape(STATISTICS[result.statistic])}</span>'
        '<span><b class="settled">outlined</b> from here on the final answer leads</span></p>'
        f"{''.join(_section(result, panel, high) for panel in result.panels)}</div>"
    )


def _section(result: Trajectory, panel: Sequence[Column], high: float) -> str:
    shown = panel[: max(MAX_CELLS // (result.layers + 1), 1)]
    lines = []
    for layer in range(result.layers, -1, -1):
        name = "model" if layer == result.layers else str(layer)
        cells = "".join(_cell(result, column, layer, high) for column in shown)
        lines.append(f"<tr><th>{name}</th>{cells}</tr>")
    named = [escape(shorten(visible(column.token) or REST, 40)) for column in shown]
    if result.positions == "last":
        named = [f"text {column.number}<br>{name}" for column, name in zip(shown, named)]
    lines.append(f'<tr class="tokens"><th>token</th>{"".join(f"<td>{name}</td>" for name in named)}</tr>')
    what = "tokens" if result.positions == "every" else "texts"
    cut = f'<p class="note">{len(shown)} of {len(panel)} {what}</p>' if len(shown) < len(panel) else ""
    return f'<section><div class="wide"><table>{"".join(lines)}</table></div>{cut}</section>'


def _cell(result: Trajectory, column: Column, layer: int, high: float) -> str:
    lines = [f"position {column.position}, layer {layer}" if layer < result.layers else "the model's own answer"]
    values = {name: column.value(name, layer) for name in STATISTICS}
    lines += [f"{STATISTICS[name]}: {value:.5g}" for name, value in values.items() if not math.isnan(value)]
    level = shade(values[result.statistic], high)
    names = ["none" if level is None else f"v{level}"]
    names += ["same"] * column.agrees(layer) + ["settled"] * (column.settled == layer)
    title = escape("\n".join(lines)).replace("\n", "&#10;")
    return f'<td class="{" ".join(names)}" title="{title}">{escape(shorten(visible(column.answer(layer)), 24))}</td>'


STYLE = f"""{shade_style()}
.ssmscope .lensed section {{ border-top: 1px solid var(--line); padding: 14px 0 16px; }}
.ssmscope .lensed table {{ border-collapse: separate; border-spacing: 1px; font-size: 12px; }}
.ssmscope .lensed th {{ position: sticky; left: 0; background: var(--paper); color: var(--soft); font-weight: 500;
  padding: 2px 8px 2px 0; text-align: right; border: 0; }}
.ssmscope .lensed td {{ padding: 2px 5px; text-align: center; white-space: pre; min-width: 2.5em; border: 0; }}
.ssmscope .lensed .tokens td {{ font-style: italic; }}
.ssmscope .lensed .same {{ font-weight: 700; }}
.ssmscope .lensed .settled {{ box-shadow: inset 0 0 0 2px var(--mark); }}
.ssmscope .lensed b.settled {{ padding: 1px 5px; font-weight: 500; }}
"""
