"""Figures of docs/stability.md: Experiments 1 and 2 of the generalisation paper, and their data.

`python benchmarks/experiments.py figure --to docs/figures` draws them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from experiments import CLASSES, START, TITLES, abscissae, fell, losses, mean, measured, records, trained
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image
from ssmscope.data.text import load_text
from ssmscope.zoo.sequences import majority

ONES_LENGTH = 200
"""Bits of a sequence in the paper's Figure 3."""
INK, SOFT, GRID = "#1b1f24", "#57606a", "#e6e9ed"
TRAINING, TEST = "#2065a8", "#d1540a"
BLUES = ("#a9cfe8", "#6fb0d9", "#4190c8", "#2f7ab8", "#2065a8", "#104a87", "#08306b")


def plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(which="both", colors=SOFT, labelsize=8.5)
    axes.set_axisbelow(True)
    axes.grid(color=GRID)


def heading(figure: Any, title: str, below: str) -> None:
    width, height = figure.get_size_inches()
    figure.text(0.2 / width, 1 - 0.27 / height, title, size=11, color=INK, va="center")
    figure.text(0.2 / width, 1 - 0.52 / height, below, size=8.5, color=SOFT, va="center")


def draw_first() -> Any:
    """Training loss and s_A against epochs, a line a run; dashed where the loss did not fall."""
    found = records("experiment1")
    figure = Figure(figsize=(9.0, 6.2), facecolor="white")
    number = sum(len(one) for lengths in found.values() for one in lengths.values())
    below = f"selective SSMs of 16 channels and 4 states, {number} runs; dashed: the loss did not fall"
    heading(figure, "Experiment 1: training from an unstable start, s_A = 0.1", below)
    grid = figure.subplots(
        2, len(found), sharex=True, gridspec_kw=dict(left=0.085, right=0.875, bottom=0.08, top=0.855)
    )
    known = sorted({T for lengths in found.values() for T in lengths})
    shades = LinearSegmentedColormap.from_list("lengths", BLUES)
    colours = dict(zip(known, shades(np.linspace(0, 1, len(known)))))
    for column, (task, lengths) in enumerate(found.items()):
        upper, lower = grid[:, column]
        for T, group in lengths.items():
            for one in group:
                style = dict(color=colours[T], linewidth=1.3, linestyle="-" if fell(one) else (0, (4, 2)))
                loss, abscissa = losses(one), abscissae(one)
                upper.plot(range(1, len(loss) + 1), loss, **style)
                lower.plot(range(len(abscissa)), abscissa, **style)
        upper.set_yscale("log")
        upper.set_title(TITLES[task], size=10, color=INK)
        lower.axhline(0, color=SOFT, linewidth=1)
        lower.axhline(START, color=SOFT, linewidth=1, linestyle=":")
        lower.set_xlabel("epoch", color=SOFT, size=9)
    for row, name in enumerate(("training loss", "spectral abscissa s_A")):
        grid[row, 0].set_ylabel(name, color=SOFT, size=9)
    for axes in grid.flat:
        plain(axes)
    low, high = zip(*(axes.get_ylim() for axes in grid[1]))
    for axes in grid[1]:
        axes.set_ylim(min(low), max(high))
    lines = [Line2D([], [], color=colours[T], linewidth=2, label=f"T = {T}") for T in known]
    figure.legend(handles=lines, loc="center left", bbox_to_anchor=(0.885, 0.5), fontsize=8.5, frameon=False)
    return figure


def draw_second() -> Any:
    """Training and test accuracy against the length: the mean over seeds with its interval, and every seed."""
    found = {task: lengths for task, lengths in trained().items() if lengths}
    figure = Figure(figsize=(9.0, 3.9), facecolor="white")
    number = sum(len(one) for lengths in found.values() for one in lengths.values())
    below = f"{number} runs; bars: 95 % bootstrap intervals of the mean over seeds; points: the seeds"
    heading(figure, "Experiment 2: accuracy against length, trained from s_A = 0", below)
    grid = figure.subplots(1, len(found), gridspec_kw=dict(left=0.075, right=0.985, bottom=0.13, top=0.77, wspace=0.17))
    for axes, (task, lengths) in zip(grid, found.items()):
        plain(axes)
        for at, (name, colour, marker) in enumerate((("training", TRAINING, "o"), ("test", TEST, "s"))):
            places, means = [], []
            for T, group in lengths.items():
                values = measured(group, "accuracy")[:, at]
                place = T + (2 * at - 1) * max(lengths) / 120  # side by side
                axes.plot([place] * len(values), values, ".", color=colour, alpha=0.35, markersize=6, linewidth=0)
                places.append(place)
                means.append(mean(values))
            value, low, high = np.array(means).T
            bars = dict(color=colour, marker=marker, markersize=4.5, linewidth=1.5, capsize=3)
            axes.errorbar(places, value, yerr=(value - low, high - value), label=name, **bars)
        axes.axhline(1 / CLASSES[task], color=SOFT, linewidth=1, linestyle=":", label="chance")
        axes.set_title(TITLES[task], size=10, color=INK, loc="left")
        axes.set_xticks(list(lengths)[:: 1 + len(lengths) // 7])
        axes.set_xlabel("length T in tokens", color=SOFT, size=9)
        axes.set_ylabel("accuracy", color=SOFT, size=9)
    place = dict(loc="upper right", bbox_to_anchor=(0.99, 0.99), ncols=3)
    figure.legend(*grid[0].get_legend_handles_labels(), fontsize=8.5, frameon=False, **place)
    return figure


def draw_data() -> Any:
    """Ones in the sequences of majority, and the lengths of IMDb's reviews: the paper's Figures 3 and 4."""
    figure = Figure(figsize=(9.0, 3.6), facecolor="white")
    below = "shares of all sequences; a length counts words, punctuation marks and two special tokens"
    heading(figure, "The data of the experiments", below)
    left, right = figure.subplots(1, 2, gridspec_kw=dict(left=0.075, right=0.985, bottom=0.14, top=0.74, wspace=0.17))
    ones = [data.ids.sum(1) for data in majority(ONES_LENGTH)]
    lengths = [text_lengths(load_text("imdb", split).texts) for split in ("train", "test")]
    titles = (f"Majority: ones of {ONES_LENGTH} bits", "IMDb: length in tokens")
    for axes, both, bins, title in (
        (left, ones, np.arange(0, ONES_LENGTH + 10, 10), titles[0]),
        (right, lengths, np.arange(0, 1250, 50), titles[1]),
    ):
        plain(axes)
        for values, name, colour in zip(both, ("training", "test"), (TRAINING, TEST), strict=True):
            shares = np.histogram(np.minimum(values, bins[-1]), bins)[0] / len(values)
            axes.stairs(shares, bins, color=colour, linewidth=1.6, label=name)
        axes.set_title(title, size=10, color=INK, loc="left")
        axes.set_ylabel("share", color=SOFT, size=9)
        axes.set_ylim(0)
    right.set_xlabel("the last bin holds all longer ones", color=SOFT, size=9)
    left.set_xlabel("ones, after a quarter of the training set's were flipped", color=SOFT, size=9)
    place = dict(loc="upper right", bbox_to_anchor=(0.99, 0.99), ncols=2)
    figure.legend(*left.get_legend_handles_labels(), fontsize=8.5, frameon=False, **place)
    return figure


def text_lengths(texts: Sequence[str]) -> np.ndarray:
    """(texts,) numbers of words and punctuation marks, before BERT cuts words, plus two special tokens."""
    return np.array([2 + len(re.findall(r"\w+|[^\w\s]", text)) for text in texts])


def draw(to: Path) -> None:
    """Draw all figures into a directory."""
    to.mkdir(parents=True, exist_ok=True)
    for name, figure in (("experiment1", draw_first()), ("experiment2", draw_second()), ("data", draw_data())):
        save(figure, to / f"{name}.png")


def save(figure: Any, path: Path) -> None:
    """Save a PNG of 64 colours, a third of the size of one with all colours."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=130)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)
