"""Figure of accuracy with more and more typing errors."""

from __future__ import annotations

from matplotlib.figure import Figure
from ssmscope.attacks.noise.result import NoiseCurve
from ssmscope.render import figure as plot


def draw(result: NoiseCurve, frame: plot.Frame) -> Figure:
    """Draw accuracy and the change of log-odds over the rate of errors."""
    legend = [(plot.rule(), "clean")]
    sheet = plot.Sheet(frame, result.headline, plot.data_line(result), legend)
    panels = sheet.panels(2.1, 2.1, sharex=True)
    rates = [100 * level.rate for level in result.levels]
    accuracies = [level.accuracy for level in result.levels]
    plot.line(panels[0], rates, accuracies, 1)
    panels[0].axhline(result.clean.value, color=plot.INK, linewidth=1, linestyle=plot.DASHED)
    panels[0].set(ylabel="accuracy", ylim=plot.limits([result.clean, *accuracies]))
    plot.line(panels[1], rates, [level.log_odds_change for level in result.levels], 1)
    panels[1].axhline(0, color=plot.SOFT, linewidth=0.8)
    panels[1].set_ylabel("change of the log-odds")
    panels[-1].set_xlabel("rate of errors, %")
    return sheet.figure
