"""The generalisation bound as a picture: the capacity against the length of texts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ssmscope.interp.views.tokens import BLUES, ramp, shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.probes.generalization import GeneralizationBound

INK, SOFT, GRID = "#1b1f24", "#57606a", "#e6e9ed"
COLOURS = ("#08306b", "#4f97cb", "#d1540a")
STYLES = ("-", "--", ":")
WIDTH, HEIGHT = 8.0, 4.6
TITLE = 88
"""As many characters as fit in a title."""
STEEP = 300.0
"""From this ln C on its axis is logarithmic, so that a model that grows does not flatten the others."""


def draw(result: GeneralizationBound) -> Figure:
    """ln C against T by its three readings, the largest C that m allows, and T itself; of a model outside of the
    theorem ln of every layer's largest output."""
    figure = Figure(figsize=(WIDTH, HEIGHT), facecolor="white")
    axes = figure.add_axes((0.09, 0.13, 0.66, 0.7))
    heading(figure, result.headline, str(result.provenance.get("model", "a model")), _below(result))
    plain(axes)
    axes.set_xscale("log")
    axes.grid(color=GRID)
    axes.axvline(result.length, color=SOFT, linewidth=0.9, linestyle=(0, (4, 3)))
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
    return figure


def scale_steep(axes: Axes, curves: np.ndarray) -> None:
    """A logarithmic axis where a curve of `curves` is steep."""
    finite = curves[np.isfinite(curves)]
    if finite.size and finite.max() > STEEP and finite.min() > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.12g}"))


def heading(figure: Figure, title: str, model: str, below: str) -> None:
    """The title, in which the model's name gives way where it is long, and a smaller line below it."""
    width, height = figure.get_size_inches()
    longest = round(TITLE * width / WIDTH)
    title = visible(title).replace(
        visible(model), shorten(visible(model), max(longest - len(title) + len(model), 8)), 1
    )
    style: dict[str, Any] = dict(va="center", parse_math=False)  # names are the user's: a $ in them starts no formula
    figure.text(0.2 / width, 1 - 0.27 / height, shorten(title, longest), size=11, color=INK, **style)
    figure.text(0.2 / width, 1 - 0.52 / height, below, size=8.5, color=SOFT, **style)


def plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(which="both", colors=SOFT, labelsize=8.5)
    axes.set_axisbelow(True)


def _below(result: GeneralizationBound) -> str:
    if result.norms is None:
        return f"largest terms on {result.inputs}; no bound on the loss follows"
    s_A, rho = result.norms.abscissa, result.norms.log_rho
    return f"s_A = {s_A:.4g}, ln ρ = {rho:.3g} a token; c_l = {result.loss_bound:g}, l = {result.lipschitz:g}".replace(
        "-", "−"
    )


def _curves(axes: Axes, result: GeneralizationBound) -> None:
    from ssmscope.probes.generalization import CURVES

    for name, curve, colour, style in zip(CURVES, result.curves, COLOURS, STYLES):
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
