"""Figure of the generalisation bound: capacity against the length of texts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from ssmscope.probes.bound.result import GeneralizationBound
from ssmscope.probes.bound.terms import CURVES
from ssmscope.render import figure as plot
from ssmscope.render.colours import BLUES, ramp
from ssmscope.render.numbers import number

CURVE_STYLES = (("#08306b", "-"), ("#4f97cb", "--"), ("#d1540a", ":"))


def draw(result: GeneralizationBound, frame: plot.Frame) -> Figure:
    """Draw ln C against T in its three readings, the largest C that m allows, and T; or each layer's largest output."""
    styles: list[dict[str, Any]]
    most = None
    if result.applies:
        assert result.examples is not None
        most = math.log(result.loss_bound * math.sqrt(result.examples) / (3 * result.lipschitz))
        styles = [{"color": colour, "linestyle": style, "linewidth": 1.7} for colour, style in CURVE_STYLES]
        legend = [(Line2D([], [], **style), name) for style, name in zip(styles, CURVES)]
        legend.append((plot.rule(plot.SOFT, "-."), f"vacuous above, m = {result.examples:,}"))
    else:
        count = len(result.layers)
        styles = [{"color": colour, "linewidth": 1.3} for colour in ramp(BLUES[2:], max(count, 2))]
        listed = {0, count - 1} if count > 8 else range(count)
        legend = [(Line2D([], [], **styles[at]), f"layer {result.layers[at].name}") for at in sorted(listed)]
    sheet = plot.Sheet(frame, result.headline, _below(result), legend)
    (axes,) = sheet.panels(3.2)
    plot.scale_log(axes, "x")
    for curve, style in zip(result.curves, styles):
        axes.plot(result.lengths, np.where(np.isfinite(curve), curve, np.nan), **style)
    if most is not None:
        axes.axhline(most, color=plot.SOFT, linewidth=1.1, linestyle="-.")
    axes.axvline(result.length, color=plot.SOFT, linewidth=0.9, linestyle=plot.DASHED)
    text: dict[str, Any] = dict(
        color=plot.SOFT, size="small", rotation=90, va="top", ha="right", transform=axes.get_xaxis_transform()
    )
    axes.text(result.length, 0.98, f"T = {result.length:,} ", **text)
    plot.scale_steep(axes, result.curves)
    axes.set(xlabel="tokens T", ylabel="ln C" if result.applies else "ln of the largest output")
    return sheet.figure


def _below(result: GeneralizationBound) -> str:
    if result.norms is None:
        return f"largest terms on {result.inputs}; no bound on the loss follows"
    growth = f"s_A = {number(result.norms.abscissa)}, ln ρ = {number(result.norms.log_rho)} a token"
    return f"{growth}; c_l = {result.loss_bound:g}, l = {result.lipschitz:g}"
