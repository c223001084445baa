"""Figure of retrieval: grids of tasks and context lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from ssmscope.core.bootstrap import Estimate
from ssmscope.probes.retrieval.result import Ratio, Retrieval
from ssmscope.render.colours import BLUES
from ssmscope.render.figure import Frame, Sheet, cells, colours_of
from ssmscope.render.letters import short_name
from ssmscope.render.numbers import brackets, number

RATIO_COLOURS = ("#8c3b00", "#d1540a", "#f0b284", "#f7f7f7", "#8fc0e0", "#2065a8", "#08306b")
"""Colours from the other model, orange, to the first, blue; distinct in every kind of colour vision."""
MIN_COLOUR_RATIO, MAX_COLOUR_RATIO = 4.0, 16.0
CELL_WIDTH, CELL_HEIGHT, SIDES = 0.66, 0.42, 1.7
PANELS_PER_ROW, TITLE_LETTERS_PER_INCH = 3, 10.5


def draw(result: Retrieval, frame: Frame) -> Figure:
    """Draw a panel of every model's accuracies, and one of every ratio, with * where the interval excludes 1."""
    count = len(result.models) + len(result.ratios)
    across = min(count, PANELS_PER_ROW)
    wide = max(CELL_WIDTH * len(result.lengths), 1.8) + SIDES
    sheet = Sheet(frame, result.headline, _below(result), width=max(across * wide, 5.2))
    high = max(CELL_HEIGHT * len(result.tasks), 0.8) + 0.25
    panels = sheet.panels(*[high] * math.ceil(count / across), across=across, count=count)
    shares = colours_of(BLUES, 0, 1)
    accuracies = [[[cell.accuracy for cell in row] for row in model] for model in result.cells]
    names = [f"accuracy of {name}" for name in result.models]
    names += [f"{result.models[0]} / {name}" for name in result.models[1:]]
    for axes, found in zip(panels, accuracies):
        values = np.array([[one.value for one in row] for row in found])
        texts = [[_text(one, number(one.value, 2)) for one in row] for row in found]
        cells(axes, values, shares, texts=texts, bar="accuracy", ticks=[0, 0.5, 1])
    reach = _reach(result.ratios)
    end = math.log(reach)
    steps = colours_of(RATIO_COLOURS, -end, end)
    scale: dict[str, Any] = dict(ticks=np.linspace(-end, end, 5), format=lambda at, _: f"{math.exp(at):.2g}")
    for axes, ratios in zip(panels[len(accuracies) :], result.ratios):
        values = np.clip([[one.value.value for one in row] for row in ratios], 1 / reach, reach)
        texts = [[_text(one.value, one.written) for one in row] for row in ratios]
        bold = np.array([[one.differs for one in row] for row in ratios])
        cells(axes, np.log(values), steps, texts=texts, bold=bold, bar="ratio", **scale)
    for axes, name in zip(panels, names):
        axes.set_title(short_name(name, round(sheet.width / across * TITLE_LETTERS_PER_INCH)))
        axes.set_xticks(range(len(result.lengths)), map(_thousands, result.lengths))
        axes.set_yticks(range(len(result.tasks)), result.tasks)
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.set_xlabel("tokens of the context")
    return sheet.figure


def _text(found: Estimate, said: str) -> str:
    return "not\ndefined" if math.isnan(found.value) else f"{said}\n{brackets(found, 2).strip()}"


def _reach(ratios: Sequence[Sequence[Sequence[Ratio]]]) -> float:
    """Return the largest factor between a ratio and 1, within the bounds of the colour scale."""
    values = [one.value.value for grid in ratios for row in grid for one in row]
    farthest = max((math.exp(abs(math.log(value))) for value in values if value > 0), default=MIN_COLOUR_RATIO)
    return min(max(farthest, MIN_COLOUR_RATIO), MAX_COLOUR_RATIO)


def _thousands(length: int) -> str:
    return f"{length // 1000}k" if length >= 1000 and length % 1000 == 0 else f"{length:,}"


def _below(result: Retrieval) -> str:
    intervals = "95 %: Wilson" + (", ratios paired bootstrap, * differs from 1" if result.ratios else "")
    chances = [f"{each:.3g}" for each in result.chance]
    chance = chances[0] if len(set(chances)) == 1 else ", ".join(chances)
    return f"{result.counted}; chance {chance}; {intervals}"
