"""Figure of the generalisation bound: capacity against the length of texts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.probes.bound.terms import CURVES
from ssmscope.render.figure import DASHED, SOFT, Sheet, scale_steep, title
from ssmscope.render.numbers import number
from ssmscope.render.tokens import BLUES, ramp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.probes.bound.result import GeneralizationBound

CURVE_STYLES = (("#08306b", "-"), ("#4f97cb", "--"), ("#d1540a", ":"))
"""Colour and dashes of the curves, two of which lie close together."""
WIDTH, HEIGHT = 8.0, 4.6
"""Size of the figure in inches."""


def draw(result: GeneralizationBound) -> Figure:
    """Draw ln C against T in its three readings, the largest C that m allows, and T itself; for a model outside the
    theorem, ln of every layer's largest output."""
    sheet = Sheet(WIDTH, HEIGHT, title(result), _below(result))
    axes = sheet.panel(0.72, sheet.top, 5.28, HEIGHT - sheet.top - 0.6, xscale="log")
    axes.axvline(result.length, color=SOFT, linewidth=0.9, linestyle=DASHED)
    if result.applies:
        _curves(axes, result)
    else:
        _outputs(axes, result)
    scale_steep(axes, result.curves)
    axes.set_xlabel("tokens T", color=SOFT, size=9)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)
    style: dict[str, Any] = dict(size=8, color=SOFT, rotation=90, va="top", ha="right", annotation_clip=False)
    place: dict[str, Any] = dict(xycoords=axes.get_xaxis_transform(), xytext=(-3, 0), textcoords="offset points")
    axes.annotate(f"T = {result.length:,}", (result.length, 0.98), **place, **style)
    return sheet.figure


def _below(result: GeneralizationBound) -> str:
    if result.norms is None:
        return f"largest terms on {result.inputs}; no bound on the loss follows"
    growth = f"s_A = {number(result.norms.abscissa)}, ln ρ = {number(result.norms.log_rho)} a token"
    return f"{growth}; c_l = {result.loss_bound:g}, l = {result.lipschitz:g}"


def _curves(axes: Axes, result: GeneralizationBound) -> None:
    assert result.examples is not None
    for name, curve, (colour, style) in zip(CURVES, result.curves, CURVE_STYLES):
        axes.plot(result.lengths, _drawn(curve), color=colour, linestyle=style, linewidth=1.7, label=name)
    most = math.log(result.loss_bound * math.sqrt(result.examples) / (3 * result.lipschitz))
    axes.axhline(most, color=SOFT, linewidth=1.1, linestyle="-.", label=f"vacuous above,\nm = {result.examples:,}")
    axes.set_ylabel("ln C", color=SOFT, size=9)


def _outputs(axes: Axes, result: GeneralizationBound) -> None:
    colours = ramp(BLUES[2:], max(len(result.layers), 2))
    listed = {0, len(result.layers) - 1} if len(result.layers) > 8 else set(range(len(result.layers)))
    for at, (one, curve, colour) in enumerate(zip(result.layers, result.curves, colours)):
        label = f"layer {one.name}" if at in listed else None
        axes.plot(result.lengths, _drawn(curve), color=colour, linewidth=1.3, label=label)
    axes.set_ylabel("ln of the largest output", color=SOFT, size=9)


def _drawn(curve: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(curve), curve, np.nan)
