"""Figure of influence: against distance, as effective context, and with the similarity of tokens by layer."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ssmscope.probes.influence.reach import SHARES
from ssmscope.probes.influence.result import Influence, norms_in_words
from ssmscope.probes.influence.similarity import MEASURES
from ssmscope.render import figure as plot
from ssmscope.render.colours import CIVIDIS
from ssmscope.render.numbers import number

SHARE_COLOURS = ("#8fc0e0", "#2065a8", "#08306b")
NAMES = {"cosine": "mean cosine", "centred": "mean cosine, centred", "spread": "share of the norm that differs"}
MIXER_STYLE: dict[str, Any] = dict(linewidth=1, linestyle=(0, (2, 1.5)), marker="x", markersize=4)


def draw(result: Influence, frame: plot.Frame) -> Figure:
    """Draw the mean of ln‖J‖ against distance with its fit; effective context and recency of every layer or, without
    layers, the share of the last k tokens; and the similarity of tokens by layer."""
    where = {"last": "last position", "all": "all positions", "chosen": "chosen positions"}[result.positions]
    below = f"{result.counted}, {where}; norms {norms_in_words(result)}"
    below += ", 95 % bootstrap intervals" * (len(result.lengths) > 1)
    sheet = plot.Sheet(frame, result.headline, below, width=13.2)
    parts = sheet.parts(4.1, across=3)
    middle = [(_contexts, 2), (_recency, 1)] if result.layers else [(_within, 1)]
    for part, panels in zip(parts, ([(_distances, 1)], middle, [(_similarity, 1)])):
        made = part.subplots(len(panels), 1, squeeze=False, height_ratios=[high for _, high in panels]).ravel()
        for axes, (draw_panel, _) in zip(made, panels):
            draw_panel(plot.styled(axes), result)
        plot.legend_below(part)
    return sheet.figure


def _distances(axes: Axes, result: Influence) -> None:
    last = max(1, len(result.layers) - 1)
    colours = plot.colours_of(CIVIDIS[:-2], 0, last)  # dark blue to ochre, which both light and dark pages show
    for layer, reach in enumerate(result.layers):
        mean = np.where(reach.noisy == 0, np.exp(reach.log_norm[:, 0]), np.nan)
        axes.plot(mean, color=colours.to_rgba(np.array(layer)), linewidth=0.9, alpha=0.85)
    reach = result.output
    distances, curve = np.arange(len(reach.pairs)), _with_band(np.exp(reach.log_norm), result)
    low, *_, high = reach.quantiles.T
    if not result.layers and (high > low).any():
        axes.fill_between(distances, low, high, color=plot.SOFT, alpha=0.12, linewidth=0, label="5–95 %")
    style: dict[str, Any] = dict(linewidth=1.6 if len(curve) < 300 else 1.0, marker="." if len(curve) < 3 else None)
    plot.line(axes, distances, curve, 0, color=plot.INK, label="output, geometric mean", **style)
    decay = reach.decay
    if decay.defined:
        ends = np.array([decay.first, decay.last])
        style = dict(linestyle=(0, (5, 2)), label=f"fit, λ = {number(decay.rate.value)}, R² {decay.r2:.2f}")
        fitted = np.exp(decay.intercept - decay.rate.value * ends)
        axes.plot(ends, fitted, color=plot.COLOURS[1], linewidth=1.6, **style)
    if np.nanmax(reach.norm[:, 0]) > 0:
        plot.scale_log(axes, "y")
    axes.set_xlim(0, max(1, len(distances) - 1))
    plot.integers(axes.xaxis, 5)
    axes.set(xlabel=f"distance t − s, {result.unit}", title="‖∂y(t)/∂x(s)‖ against distance")
    if len(result.layers) > 1:
        plot.colour_bar(axes, colours, "layer", ticks=[0, last])


def _with_band(curve: np.ndarray, result: Influence) -> np.ndarray:
    """Return value, low and high (…, 3), the last two NaN for a single text, which has no interval."""
    return curve if len(result.lengths) > 1 else curve * [1, np.nan, np.nan]


def _contexts(axes: Axes, result: Influence) -> None:
    """Draw medians with quartiles, and a triangle at the top where the texts do not reach the share."""
    layers, most, own = np.arange(len(result.layers)), float(result.lengths.max()), result.of_own_tokens
    top = most * 1.35
    for column, (share, colour) in enumerate(zip(SHARES, SHARE_COLOURS)):
        within = (partial(each.effective_context, share, within=own) for each in result.layers)
        quartiles = [[context(quantile) for quantile in (0.25, 0.5, 0.75)] for context in within]
        low, middle, high = np.where(np.isfinite(quartiles), quartiles, top).T
        at, missing = layers + 0.18 * (column - 1), np.isinf(quartiles)[:, 1]
        middle = np.where(np.isfinite(quartiles)[:, 1], middle, np.nan)
        axes.plot(at, middle, color=colour, linewidth=0.8, marker="o", markersize=4, label=f"{100 * share:.0f} %")
        axes.vlines(np.where(np.isnan(middle), np.nan, at), low, high, color=colour, linewidth=1.1)
        if missing.any():  # The layout takes an empty curve that is not clipped for one at the figure's corner.
            axes.plot(at[missing], np.full(missing.sum(), top), "^", color=colour, markersize=5, clip_on=False)
    axes.axhline(most, color=plot.SOFT, linewidth=0.8, linestyle=plot.DASHED)
    plot.scale_log(axes, "y")
    axes.set(xlim=(-0.5, len(layers) - 0.5), ylim=(0.8, top))
    plot.integers(axes.xaxis, 8)
    what = f"effective context, {result.unit}"
    axes.set_title(f"{what}, within the text" if own else f"{what} (▲ not reached)")


def _recency(axes: Axes, result: Influence) -> None:
    found = [reach.recent(result.recent) for reach in result.layers]
    axes.bar(range(len(found)), [each.value for each in found], 0.6, color=SHARE_COLOURS[0])
    for layer, each in enumerate(found):
        plot.interval(axes, layer, each)
    axes.set(xlim=(-0.5, len(found) - 0.5), ylim=(0, 1), yticks=[0, 0.5, 1], xlabel="layer")
    plot.integers(axes.xaxis, 8)
    axes.set_title(f"share of the last {result.recent} {result.unit}")


def _within(axes: Axes, result: Influence) -> None:
    reach, own = result.output, result.of_own_tokens
    curve = _with_band(plot.as_array(reach.within), result)
    plot.line(axes, 1 + np.arange(len(curve)), curve, 0, color=SHARE_COLOURS[1], marker="")
    for share, colour in zip(SHARES, SHARE_COLOURS):
        middle = reach.effective_context(share, within=own)
        if math.isnan(middle):
            continue
        shown, what = math.isfinite(middle), "within the text" if own else "effective context"
        text = f"{100 * share:.0f} %, {what}: " + (f"{middle:,.0f}" if shown else "not reached")
        style: dict[str, Any] = dict(markersize=7, clip_on=not shown, zorder=3, label=text)
        axes.plot([middle] * shown, [0] * shown, "^", color=colour, **style)
    plot.scale_log(axes, "x")
    axes.set(xlim=(1, max(2, len(curve))), ylim=(0, 1.02), xlabel=f"last k {result.unit}")
    axes.set_title("share of the influence within the last k")


def _similarity(axes: Axes, result: Influence) -> None:
    similarity = result.similarity
    stream = np.arange(len(similarity.places))
    for place, (measure, colour) in enumerate(zip(MEASURES, plot.COLOURS)):
        curve = _with_band(similarity.stream[:, place], result)
        plot.line(axes, stream, curve, place, marker=".", label=NAMES[measure])
        axes.plot(stream[1:-1], similarity.mixer[:, place, 0], color=colour, **MIXER_STYLE)
    axes.plot([], [], color=plot.SOFT, label="mixers' outputs", **MIXER_STYLE)
    axes.axhline(0, color=plot.SOFT, linewidth=0.8)
    layers = len(stream) - 2
    step = math.ceil(layers / 6)
    shown = range(layers) if step == 1 else range(step, layers - step // 2, step)
    axes.set_xticks([0, *(1 + layer for layer in shown), layers + 1], ["emb.", *map(str, shown), "out"])
    low = float(np.nanmin([*similarity.stream[..., :2].ravel(), *similarity.mixer[..., 0].ravel(), -0.05]))
    axes.set(ylim=(max(-1.02, low - 0.08), 1.02), xlabel="layer (lines: after its block)")
    axes.set_title(f"similarity of the {result.unit} of {result.one}")
