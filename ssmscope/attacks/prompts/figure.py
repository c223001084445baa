"""Figure of attacks on prompts: clean and attacked accuracy by attack and template."""

from __future__ import annotations

import math

from matplotlib.figure import Figure
from ssmscope.attacks.names import FROM_PROMPTBENCH
from ssmscope.attacks.prompts.result import PromptAttack
from ssmscope.render import figure as plot
from ssmscope.render.table import in_percent

LETTERS = max(map(len, FROM_PROMPTBENCH)) + 3
"""Maximum letters of an attack's name with a template's number."""


def draw(result: PromptAttack, frame: plot.Frame) -> Figure:
    """Draw a row for each attack and template: the clean accuracy and the attacked one with intervals. The average drop
    stands next to each attack."""
    number = len(result.templates)
    templates = f"{number} templates" if number > 1 else "one template"
    beside = any(one.name in FROM_PROMPTBENCH for one in result.attacks)
    way = (
        "promptbench: by that package"
        if beside
        else f"measured {'' if result.as_promptbench else 'not '}as PromptBench"
    )
    clean, worst = plot.handle(0, linestyle="", markerfacecolor="white"), plot.handle(1, linestyle="", marker="o")
    legend = [(clean, "clean prompt"), (worst, "worst prompt found"), (plot.rule(plot.SOFT), "mean of the clean ones")]
    sheet = plot.Sheet(frame, result.headline, plot.data_line(result, templates, way), legend)
    rows = number * len(result.attacks)
    (axes,) = sheet.panels(0.2 * rows + 0.1 if number > 1 else 0.3 * rows)
    names, notes = [], []
    for index, one in enumerate(result.attacks):
        drop = "no drop defined" if math.isnan(one.drop.value) else f"drop {in_percent(one.drop)}"
        names += [f"{one.name}{f' {at}' if number > 1 else ''}" if at == 0 else str(at) for at in range(number)]
        notes += [drop, *[""] * (number - 1)]
        if index:
            axes.axhline(index * number - 0.5, color=plot.GRID, linewidth=0.8)
    both = (list(result.clean) * len(result.attacks), [each.accuracy for one in result.attacks for each in one.prompts])
    plot.points(axes, names, *both, markers="oo", notes=notes, zero=False, hollow=(0,), letters=LETTERS)
    axes.axvline(result.average_clean.value, color=plot.SOFT, linewidth=0.9, linestyle=plot.DASHED, zorder=0)
    axes.set(xlim=(-0.01, 1.01), xlabel="accuracy")
    return sheet.figure
