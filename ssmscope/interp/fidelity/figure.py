"""Figure of fidelity: ΔA with its interval, and the output as more and more tokens are hidden."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from ssmscope.interp.fidelity.measures import LERF, MORF
from ssmscope.interp.fidelity.result import Fidelity
from ssmscope.render import figure as plot
from ssmscope.render.letters import short_name
from ssmscope.render.numbers import counted

ORDERS: tuple[tuple[int, dict[str, Any], str], ...] = (
    (MORF, {"color": plot.COLOURS[1], "linestyle": "-"}, "most relevant first (MoRF)"),
    (LERF, {"color": plot.COLOURS[0], "linestyle": plot.DASHED}, "least relevant first (LeRF)"),
)
CHANCE: dict[str, Any] = {"color": plot.SOFT, "linestyle": plot.DOTTED}
ACROSS, CURVE_INCHES = 3, 1.6


def draw(result: Fidelity, frame: plot.Frame) -> Figure:
    """Draw ΔA of every method and of the random rankings with intervals; below, the mean of f along each method's
    rankings, most relevant first and least relevant first, with those of the random rankings."""
    options, data = result.provenance["options"], result.provenance["data"]
    how = "deleted" if options["mode"] == "delete" else f"replaced ({options['replacement']})"
    texts = f"{counted(len(result.texts), 'text')} of {short_name(data['name'] + ' (' + data['split'] + ')', 40)}"
    below = f"{texts}, tokens {short_name(how, 30)}, 95 % bootstrap intervals"
    legend = [*((Line2D([], [], **style), name) for _, style, name in ORDERS), (Line2D([], [], **CHANCE), "random")]
    sheet = plot.Sheet(frame, result.headline, below, legend)
    across = min(ACROSS, max(1, int(sheet.width / 1.5)))
    lines = math.ceil(len(result.methods) / across)
    high = plot.ROW_INCHES * len(result.rows) + plot.AXIS_INCHES
    upper, lower = sheet.parts(high, lines * (CURVE_INCHES + 0.3) + 0.4, least=0.8)
    axes = plot.styled(upper.subplots())
    colours = [[plot.INK] * len(result.methods) + [plot.SOFT]]
    plot.points(axes, result.rows, [result.estimate(method) for method in result.rows], colours=colours)
    spread, place = result.rankings[:, 0], len(result.rows) - 1
    axes.plot([spread.min(), spread.max()], [place, place], color=plot.SOFT, linewidth=6, alpha=0.3)
    axes.set_xlabel("ΔA = A_LeRF − A_MoRF (the grey bar: the random rankings one by one)")
    low, high = result.curve[..., 1].min(), result.curve[..., 2].max()
    room = 0.04 * max(high - low, 1e-9)
    panels = plot.grid(lower, len(result.methods), across, sharex=True, sharey=True)
    for number, (method, axes) in enumerate(zip(result.methods, map(plot.styled, panels))):
        plot.line(axes, result.shares, result.curve[-1].mean(0), 0, marker="", **CHANCE)
        for order, style, _ in ORDERS:
            plot.line(axes, result.shares, result.curve[number, order], 0, marker="", **style)
        axes.set(xlim=(0, 1), ylim=(low - room, high + room), title=short_name(method, 30))
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])
        axes.tick_params(labelbottom=number + across >= len(result.methods))
    lower.supylabel(f"{result.value} of the class", fontsize="medium", color=plot.SOFT)
    lower.supxlabel("share q of the tokens hidden", fontsize="medium", color=plot.SOFT)
    return sheet.figure
