"""Figure of influence: against distance, as effective context, and with the similarity of tokens by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.ticker import MaxNLocator

from ssmscope.probes.influence.reach import SHARES, Reach
from ssmscope.probes.influence.result import norms_in_words
from ssmscope.probes.influence.similarity import MEASURES
from ssmscope.render.figure import COLOURS, DASHED, INK, SOFT, Sheet, interval, title
from ssmscope.render.numbers import number
from ssmscope.render.tokens import CIVIDIS, ramp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.probes.influence.result import Influence

SHARE_COLOURS = ("#8fc0e0", "#2065a8", "#08306b")
"""Colours of 50, 90 and 95 %: one hue, darker for more."""
NAMES = {"cosine": "mean cosine", "centred": "mean cosine, centred", "spread": "share of the norm that differs"}

WIDTH, HEIGHT, TOP, BOTTOM, LEFT, PANEL, GAP = 13.2, 5.1, 1.0, 1.1, 0.75, 3.5, 0.8
"""Sizes in inches."""
TICKS = tuple(digit * 10**power for power in range(5) for digit in (1, 2, 5))
LAYER_COLOURS = ramp(CIVIDIS[:-1], 256)
"""Colours from dark blue, the first layer, to yellow, the last."""
MIXER_STYLE: dict[str, Any] = dict(linewidth=1, linestyle=(0, (2, 1.5)), marker="x", markersize=4)


def draw(result: Influence) -> Figure:
    """Draw three panels: the mean of ln‖J‖ against distance with its fit, and that of the layers in colours from first
    to last; effective context and recency of every layer or, without layers, the share of the last k tokens; and the
    similarity of tokens by layer."""
    sheet = Sheet(WIDTH, HEIGHT, title(result), _described(result))
    first, second, third = (LEFT + panel * (PANEL + GAP) for panel in range(3))
    inside = HEIGHT - TOP - BOTTOM
    distances = sheet.panel(first, TOP, PANEL, inside)
    _distances(distances, result)
    if result.layers:
        lower = (inside - 0.45) * 0.36
        upper = sheet.panel(second, TOP, PANEL, inside - lower - 0.45)
        _contexts(upper, result)
        low = sheet.panel(second, TOP + inside - lower, PANEL, lower)
        _recency(low, result)
        _legend(low, *upper.get_legend_handles_labels(), columns=3)
        _colours(sheet.figure, distances, result)
    else:
        _within(sheet.panel(second, TOP, PANEL, inside), result)
    _similarity(sheet.panel(third, TOP, PANEL, inside), result)
    return sheet.figure


def _described(result: Influence) -> str:
    where = {"last": "last position", "all": "all positions", "chosen": "chosen positions"}[result.positions]
    intervals = ", 95 % bootstrap intervals" if len(result.lengths) > 1 else ""
    return f"{result.counted}, {where}; norms {norms_in_words(result)}{intervals}"


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", size=9.5, color=INK, pad=9)


def _distances(axes: Axes, result: Influence) -> None:
    for layer, reach in enumerate(result.layers):
        usable = reach.noisy == 0
        mean = np.where(usable, np.exp(reach.log_norm[:, 0]), np.nan)
        axes.plot(
            mean, color=LAYER_COLOURS[round(255 * layer / max(1, len(result.layers) - 1))], linewidth=0.9, alpha=0.85
        )
    reach = result.output
    distances = np.arange(len(reach.pairs))
    mean, low, high = np.exp(reach.log_norm).T
    if not result.layers:
        q5, q95 = reach.quantiles[:, 0], reach.quantiles[:, -1]
        axes.fill_between(distances, q5, q95, color=SOFT, alpha=0.12, linewidth=0, label="5–95 %")
    if len(result.lengths) > 1:
        axes.fill_between(distances, low, high, color=INK, alpha=0.25, linewidth=0)
    label, dot = "output, geometric mean", "." if len(mean) < 3 else None
    axes.plot(distances, mean, color=INK, linewidth=1.6 if len(mean) < 300 else 1.0, marker=dot, label=label)
    decay = reach.decay
    if decay.defined:
        ends = np.array([decay.first, decay.last])
        line = np.exp(decay.intercept - decay.rate.value * ends)
        label = f"fit, λ = {number(decay.rate.value)}, R² {decay.r2:.2f}"
        axes.plot(ends, line, color=COLOURS[1], linewidth=1.6, linestyle=(0, (5, 2)), label=label)
    if np.nanmax(reach.norm[:, 0]) > 0:
        axes.set_yscale("log")
    axes.set_xlim(0, max(1, len(distances) - 1))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel(f"distance t − s, {result.unit}", color=SOFT, size=9)
    _title(axes, "‖∂y(t)/∂x(s)‖ against distance")
    axes.legend(loc="upper right", fontsize=8, frameon=True, framealpha=0.85, edgecolor="none")


def _colours(figure: Figure, beside: Axes, result: Influence) -> None:
    """Draw a narrow colour bar of the layers, unless there is only one."""
    if len(result.layers) < 2:
        return
    box = beside.get_position()
    bar = figure.add_axes((box.x1 + 0.1 / WIDTH, box.y0, 0.09 / WIDTH, box.height))
    scale = Normalize(0, len(result.layers) - 1)
    shown = figure.colorbar(ScalarMappable(scale, ListedColormap(LAYER_COLOURS)), cax=bar)
    shown.set_ticks([0, len(result.layers) - 1])
    shown.outline.set_visible(False)
    bar.tick_params(colors=SOFT, labelsize=8, length=2, pad=1)
    bar.set_title("layer", size=8, color=SOFT, pad=4)


def _contexts(axes: Axes, result: Influence) -> None:
    """Draw medians with quartiles, and a triangle at the top where the texts do not reach the share."""
    layers = np.arange(len(result.layers))
    most = float(result.lengths.max())
    top = most * 1.35
    own = result.of_own_tokens
    for column, share in enumerate(SHARES):
        low, middle, high = (_quantiles(result.layers, share, quantile, own) for quantile in (0.25, 0.5, 0.75))
        at = layers + 0.18 * (column - 1)
        reached = np.isfinite(middle)
        colour = SHARE_COLOURS[column]
        label = f"{100 * share:.0f} %"
        axes.plot(
            at, np.where(reached, middle, np.nan), color=colour, linewidth=0.8, marker="o", markersize=4, label=label
        )
        for place in np.flatnonzero(reached):
            end = high[place] if np.isfinite(high[place]) else top
            axes.plot([at[place]] * 2, [low[place], end], color=colour, linewidth=1.1, solid_capstyle="butt")
        missing = np.isinf(middle)
        axes.plot(at[missing], np.full(missing.sum(), top), "^", color=colour, markersize=5, clip_on=False)
    axes.axhline(most, color=SOFT, linewidth=0.8, linestyle=DASHED)
    axes.set_yscale("log")
    axes.set_ylim(0.8, top)
    ticks = [tick for tick in TICKS if tick <= most]
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_yticks([], minor=True)
    _by_layer(axes, len(layers))
    axes.set_xticklabels([])
    axes.set_xlabel("")
    what = f"effective context, {result.unit}"
    _title(axes, f"{what}, within the text" if own else f"{what} (▲ not reached)")


def _quantiles(reaches: Sequence[Reach], share: float, quantile: float, own: bool) -> np.ndarray:
    return np.array([reach.effective_context(share, quantile, within=own) for reach in reaches])


def _by_layer(axes: Axes, layers: int) -> None:
    axes.set_xlim(-0.5, layers - 0.5)
    axes.set_xticks(_every(layers, 8))
    axes.set_xlabel("layer", color=SOFT, size=9)


def _recency(axes: Axes, result: Influence) -> None:
    found = [reach.recent(result.recent) for reach in result.layers]
    layers = np.arange(len(found))
    values = [each.value for each in found]
    axes.bar(layers, values, 0.6, color=SHARE_COLOURS[0])
    for layer, each in enumerate(found):
        interval(axes, layer, each)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1])
    _by_layer(axes, len(found))
    _title(axes, f"share of the last {result.recent} {result.unit}")


def _within(axes: Axes, result: Influence) -> None:
    """Draw the share of the last k tokens, and the effective context on the axis."""
    reach = result.output
    tokens = 1 + np.arange(len(reach.within))
    value, low, high = reach.within.T
    if len(result.lengths) > 1:
        axes.fill_between(tokens, low, high, color=SHARE_COLOURS[1], alpha=0.22, linewidth=0)
    axes.plot(tokens, value, color=SHARE_COLOURS[1], linewidth=1.6)
    own = result.of_own_tokens
    for column, share in enumerate(SHARES):
        middle = reach.effective_context(share, within=own)
        if math.isnan(middle):
            continue
        text = f"{100 * share:.0f} %: " + ("not reached" if math.isinf(middle) else f"{middle:,.0f}")
        axes.plot([], [], "^", color=SHARE_COLOURS[column], markersize=6, linestyle="none", label=text)
        if math.isfinite(middle):
            axes.plot([middle], [0], "^", color=SHARE_COLOURS[column], markersize=7, clip_on=False, zorder=3)
    axes.set_xscale("log")
    axes.set_xlim(1, max(2, len(tokens)))
    ticks = [tick for tick in TICKS if tick <= len(tokens)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"last k {result.unit}", color=SOFT, size=9)
    _title(axes, "share of the influence within the last k")
    title = "within the text" if own else "effective context"
    legend = axes.legend(loc="lower right", fontsize=8, title=title, title_fontsize=8, framealpha=0.85)
    legend.get_frame().set_edgecolor("none")


def _similarity(axes: Axes, result: Influence) -> None:
    similarity = result.similarity
    stream = np.arange(len(similarity.places))
    own = stream[1:-1]
    for place, (measure, colour) in enumerate(zip(MEASURES, COLOURS)):
        value, low, high = similarity.stream[:, place].T
        if len(result.lengths) > 1:
            axes.fill_between(stream, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(stream, value, color=colour, linewidth=1.5, marker=".", markersize=5, label=NAMES[measure])
        mixer = similarity.mixer[:, place, 0]
        axes.plot(own, mixer, color=colour, **MIXER_STYLE)
    axes.plot([], [], color=SOFT, label="mixers' outputs", **MIXER_STYLE)
    axes.axhline(0, color=SOFT, linewidth=0.8)
    layers = len(own)
    shown = [layer for layer in _every(layers, 6) if layers <= 6 or layers / 8 <= layer <= layers - layers / 8]
    places, names = [0, *(1 + layer for layer in shown), layers + 1], ["emb.", *map(str, shown), "out"]
    axes.set_xticks(places, names)
    axes.set_xlabel("layer (lines: after its block)", color=SOFT, size=9)
    low = float(np.nanmin([*similarity.stream[..., :2].ravel(), *similarity.mixer[..., 0].ravel(), -0.05]))
    axes.set_ylim(max(-1.02, low - 0.08), 1.02)
    _title(axes, f"similarity of the {result.unit} of {result.one}")
    _legend(axes, *axes.get_legend_handles_labels(), columns=2)


def _legend(axes: Axes, handles: Sequence[Any], labels: Sequence[str], *, columns: int) -> None:
    """Draw a legend below the axes' label."""
    height = axes.get_position().height * HEIGHT
    style: dict[str, Any] = dict(ncols=columns, fontsize=8, frameon=False, columnspacing=1.2)
    axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(-0.04, -0.45 / height), **style)


def _every(layers: int, most: int) -> list[int]:
    """Return at most `most` of the layers' numbers, evenly spaced."""
    return [*range(0, layers, math.ceil(layers / most))]
