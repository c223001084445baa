"""Drawing on a sheet measured in inches: many boxes at once, colour bars, and text in fonts that have its glyphs."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from matplotlib import font_manager
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ssmscope.render.figure import COLOURS, GRID, INK, SOFT
from ssmscope.render.signed import SIGNED
from ssmscope.render.tokens import ramp

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARGIN, BAR_WIDTH = 0.2, 1.5
"""Margin of a sheet and width of a colour bar, in inches."""
EMPTY, MARK = GRID, COLOURS[1]
"""Colours of a box without a value, and of marks on boxes."""
FALLBACK_FONTS = (
    *("DejaVu Sans Mono", "DejaVu Sans", "Noto Sans Mono CJK SC", "Noto Sans CJK SC", "Noto Sans CJK JP"),
    *("Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "IPAGothic", "PingFang SC"),
    *("Hiragino Sans", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Arial Unicode MS"),
    *("Noto Emoji", "Symbola", "Segoe UI Symbol"),
)


def sheet_of(width: float, height: float) -> Axes:
    """Make a white figure and return its only axes, in inches from the upper left."""
    sheet = Figure(figsize=(width, height), facecolor="white").add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    sheet.set_axis_off()
    return sheet


def colour_bar(sheet: Axes, left: float, stops: Sequence[str], ends: tuple[str, str], name: str) -> None:
    """Draw a colour scale at the top of the sheet, with labels of its ends and its name."""
    figure = sheet.get_figure()
    assert isinstance(figure, Figure)
    width, height = figure.get_size_inches()
    axes = figure.add_axes((left / width, 1 - 0.32 / height, BAR_WIDTH / width, 0.11 / height))
    mappable = ScalarMappable(cmap=ListedColormap(ramp(stops, 256)))
    labels: dict[float, str] = {0: ends[0], 0.5: "0", 1: ends[1]} if stops is SIGNED else {0: ends[0], 1: ends[1]}
    scale = figure.colorbar(mappable, cax=axes, orientation="horizontal", ticks=list(labels))
    scale.outline.set_linewidth(0.4)
    axes.set_xticklabels(list(labels.values()), fontsize=7, color=SOFT)
    axes.tick_params(length=2, width=0.4, pad=1.5)
    axes.set_xlabel(name, fontsize=7, color=SOFT, labelpad=1)


def fill(sheet: Axes, places: Sequence[tuple[Rectangle, str]], edge: str) -> None:
    """Draw rectangles in their colours, as one collection."""
    patches, colours = [patch for patch, _ in places], [colour for _, colour in places]
    sheet.add_collection(PatchCollection(patches, facecolors=colours, edgecolors=edge, linewidths=0.4), autolim=False)


def write(sheet: Axes, x: float, y: float, text: str, *, color: str = INK, **style: Any) -> None:
    """Write text literally: without mathematics between dollar signs, whatever the user's settings."""
    style.setdefault("family", families("DejaVu Sans"))
    sheet.text(x, y, drawable(text), color=color, parse_math=False, usetex=False, **style)


@lru_cache
def families(first: str = "DejaVu Sans Mono") -> list[str]:
    """Return the fonts to take glyphs from, in order: the first, then the fallbacks that this machine has."""
    present = {entry.name for entry in font_manager.fontManager.ttflist}
    return [first, *(name for name in FALLBACK_FONTS if name in present and name != first)]


@lru_cache(maxsize=4096)
def _has_glyph(character: str) -> bool:
    paths = (font_manager.findfont(family) for family in families())
    return any(font_manager.get_font(path).get_char_index(ord(character)) for path in paths)


def drawable(text: str) -> str:
    """Replace every character without a glyph in the fonts by a box, or drop it if it has no width."""
    return "".join(character if _has_glyph(character) else "" if _width(character) == 0 else "□" for character in text)


def _width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def letters(text: str) -> int:
    """Return the width of a text in monospaced characters: 2 for a wide glyph, 0 for a mark without width."""
    return sum(map(_width, text))
