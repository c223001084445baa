"""Figure of influence: against distance, as effective context, and with the similarity of tokens by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ssmscope.probes.influence.reach import SHARES, Reach
from ssmscope.probes.influence.result import Influence, norms_in_words
from ssmscope.probes.influence.similarity import MEASURES
from ssmscope.render import figure as plot
from ssmscope.render.colours import CIVIDIS
from ssmscope.render.numbers import number

SHARE_COLOURS = ("#8fc0e0", "#2065a8", "#08306b")
"""Colours of 50, 90 and 95 %: one hue, darker for more."""
NAMES = {"cosine": "mean cosine", "centred": "mean cosine, centred", "spread": "share of the norm that differs"}
MIXER_STYLE: dict[str, Any] = dict(linewidth=1, linestyle=(0, (2, 1.5)), marker="x", markersize=4)


def draw(result: Influence, frame: plot.Frame) -> Figure:
    """Draw three panels: the mean of ln‖J‖ against distance with its fit, and that of the layers in colours from first
    to last; effective context and recency of every layer or, without layers, the share of the last k tokens; and the
    similarity of tokens by layer."""
    where = {"last": "last position", "all": "all positions", "chosen": "chosen positions"}[result.positions]
    below = f"{result.counted}, {where}; norms {norms_in_words(result)}"
    below += ", 95 % bootstrap intervals" * (len(result.lengths) > 1)
    sheet = plot.Sheet(frame, result.headline, below, width=13.2)
    drawn = (_distances, _contexts if result.layers else _within, _similarity)
    for part, draw_panel in zip(sheet.parts(4.1, across=3), drawn):
        axes, *others = part.subplots(2, 1, height_ratios=(2, 1)) if draw_panel is _contexts else [part.subplots()]
        draw_panel(plot.styled(axes), result)
        for each in others:
            _recency(plot.styled(each), result)
        part.legend(loc="outside lower left", ncols=1 if sheet.width < plot.NARROW_INCHES else 2)
    return sheet.figure


def _distances(axes: Axes, result: Influence) -> None:
    last = max(1, len(result.layers) - 1)
    colours = plot.colours_of(CIVIDIS[:-1], 0, last)  # dark blue, the first layer, to yellow, the last
    for layer, reach in enumerate(result.layers):
        mean = np.where(reach.noisy == 0, np.exp(reach.log_norm[:, 0]), np.nan)
        axes.plot(mean, color=colours.to_rgba(np.array(layer)), linewidth=0.9, alpha=0.85)
    reach = result.output
    distances = np.arange(len(reach.pairs))
    mean, low, high = np.exp(reach.log_norm).T
    if not result.layers:
        quantiles = (reach.quantiles[:, 0], reach.quantiles[:, -1])
        axes.fill_between(distances, *quantiles, color=plot.SOFT, alpha=0.12, linewidth=0, label="5–95 %")
    if len(result.lengths) > 1:
        axes.fill_between(distances, low, high, color=plot.INK, alpha=0.25, linewidth=0)
    style: dict[str, Any] = dict(linewidth=1.6 if len(mean) < 300 else 1.0, marker="." if len(mean) < 3 else None)
    axes.plot(distances, mean, color=plot.INK, label="output, geometric mean", **style)
    decay = reach.decay
    if decay.defined:
        ends = np.array([decay.first, decay.last])
        fitted = np.exp(decay.intercept - decay.rate.value * ends)
        label = f"fit, λ = {number(decay.rate.value)}, R² {decay.r2:.2f}"
        axes.plot(ends, fitted, color=plot.COLOURS[1], linewidth=1.6, linestyle=(0, (5, 2)), label=label)
    if np.nanmax(reach.norm[:, 0]) > 0:
        plot.scale_log(axes, "y")
    axes.set_xlim(0, max(1, len(distances) - 1))
    plot.integers(axes.xaxis, 5)
    axes.set(xlabel=f"distance t − s, {result.unit}", title="‖∂y(t)/∂x(s)‖ against distance")
    if len(result.layers) > 1:
        plot.colour_bar(axes, colours, "layer", ticks=[0, last])


def _contexts(axes: Axes, result: Influence) -> None:
    """Draw medians with quartiles, and a triangle at the top where the texts do not reach the share."""
    layers, most, own = np.arange(len(result.layers)), float(result.lengths.max()), result.of_own_tokens
    top = most * 1.35
    for column, (share, colour) in enumerate(zip(SHARES, SHARE_COLOURS)):
        low, middle, high = (_quantiles(result.layers, share, quantile, own) for quantile in (0.25, 0.5, 0.75))
        at = layers + 0.18 * (column - 1)
        reached, missing = np.isfinite(middle), np.isinf(middle)
        shown = np.where(reached, middle, np.nan)
        axes.plot(at, shown, color=colour, linewidth=0.8, marker="o", markersize=4, label=f"{100 * share:.0f} %")
        axes.vlines(
            at[reached], low[reached], np.where(np.isfinite(high), high, top)[reached], color=colour, linewidth=1.1
        )
        if missing.any():  # The layout takes an empty curve that is not clipped for one at the figure's corner.
            axes.plot(at[missing], np.full(missing.sum(), top), "^", color=colour, markersize=5, clip_on=False)
    axes.axhline(most, color=plot.SOFT, linewidth=0.8, linestyle=plot.DASHED)
    plot.scale_log(axes, "y")
    axes.set(xlim=(-0.5, len(layers) - 0.5), ylim=(0.8, top))
    plot.integers(axes.xaxis, 8)
    what = f"effective context, {result.unit}"
    axes.set_title(f"{what}, within the text" if own else f"{what} (▲ not reached)")


def _quantiles(reaches: Sequence[Reach], share: float, quantile: float, own: bool) -> np.ndarray:
    return np.array([reach.effective_context(share, quantile, within=own) for reach in reaches])


def _recency(axes: Axes, result: Influence) -> None:
    found = [reach.recent(result.recent) for reach in result.layers]
    axes.bar(range(len(found)), [each.value for each in found], 0.6, color=SHARE_COLOURS[0])
    for layer, each in enumerate(found):
        plot.interval(axes, layer, each)
    axes.set(xlim=(-0.5, len(found) - 0.5), ylim=(0, 1), yticks=[0, 0.5, 1], xlabel="layer")
    plot.integers(axes.xaxis, 8)
    axes.set_title(f"share of the last {result.recent} {result.unit}")


def _within(axes: Axes, result: Influence) -> None:
    """Draw the share of the last k tokens, and the effective context on the axis."""
    reach, own = result.output, result.of_own_tokens
    curve = plot.as_array(reach.within)
    if len(result.lengths) == 1:
        curve[:, 1:] = np.nan
    plot.line(axes, 1 + np.arange(len(curve)), curve, 0, color=SHARE_COLOURS[1], marker="")
    for share, colour in zip(SHARES, SHARE_COLOURS):
        middle = reach.effective_context(share, within=own)
        if math.isnan(middle):
            continue
        what = "within the text" if own else "effective context"
        text = f"{100 * share:.0f} %, {what}: " + ("not reached" if math.isinf(middle) else f"{middle:,.0f}")
        shown = math.isfinite(middle)
        axes.plot(
            [middle] * shown, [0] * shown, "^", color=colour, markersize=7, clip_on=not shown, zorder=3, label=text
        )
    plot.scale_log(axes, "x")
    axes.set(xlim=(1, max(2, len(curve))), ylim=(0, 1.02), xlabel=f"last k {result.unit}")
    axes.set_title("share of the influence within the last k")


def _similarity(axes: Axes, result: Influence) -> None:
    similarity = result.similarity
    stream = np.arange(len(similarity.places))
    for place, (measure, colour) in enumerate(zip(MEASURES, plot.COLOURS)):
        curve = similarity.stream[:, place].copy()
        if len(result.lengths) == 1:
            curve[:, 1:] = np.nan
        plot.line(axes, stream, curve, place, marker=".", label=NAMES[measure])
        axes.plot(stream[1:-1], similarity.mixer[:, place, 0], color=colour, **MIXER_STYLE)
    axes.plot([], [], color=plot.SOFT, label="mixers' outputs", **MIXER_STYLE)
    axes.axhline(0, color=plot.SOFT, linewidth=0.8)
    layers = len(stream) - 2
    every = range(0, layers, math.ceil(layers / 6))
    shown = [layer for layer in every if layers <= 6 or layers / 8 <= layer <= layers - layers / 8]
    axes.set_xticks([0, *(1 + layer for layer in shown), layers + 1], ["emb.", *map(str, shown), "out"])
    low = float(np.nanmin([*similarity.stream[..., :2].ravel(), *similarity.mixer[..., 0].ravel(), -0.05]))
    axes.set(ylim=(max(-1.02, low - 0.08), 1.02), xlabel="layer (lines: after its block)")
    axes.set_title(f"similarity of the {result.unit} of {result.one}")
