"""Drawing tokens on a sheet measured in inches: many boxes at once, and text in fonts that have its glyphs."""

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

from ssmscope.show.figure import COLOURS, GRID, INK, SOFT
from ssmscope.show.tokens import ramp

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARGIN, BAR = 0.2, 1.5
"""In inches: what is left of everything, and the width of a colour bar."""
EMPTY, MARK = GRID, COLOURS[1]
"""A box without a value, and what sets a box apart from the others."""
FALLBACK_FONTS = (
    *("DejaVu Sans Mono", "DejaVu Sans", "Noto Sans Mono CJK SC", "Noto Sans CJK SC", "Noto Sans CJK JP"),
    *("Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "IPAGothic", "PingFang SC"),
    *("Hiragino Sans", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Arial Unicode MS"),
    *("Noto Emoji", "Symbola", "Segoe UI Symbol"),
)


def sheet_of(width: float, height: float) -> Axes:
    """A white figure's only axes, in inches from its upper left."""
    sheet = Figure(figsize=(width, height), facecolor="white").add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    sheet.set_axis_off()
    return sheet


def colour_bar(sheet: Axes, left: float, stops: Sequence[str], ends: tuple[str, str], name: str) -> None:
    """A scale from the first to the last colour at the top of the sheet: what its ends are, and of what it is."""
    figure = sheet.get_figure()
    assert isinstance(figure, Figure)
    width, height = figure.get_size_inches()
    axes = figure.add_axes((left / width, 1 - 0.32 / height, BAR / width, 0.11 / height))
    mappable = ScalarMappable(cmap=ListedColormap(ramp(stops, 256)))
    scale = figure.colorbar(mappable, cax=axes, orientation="horizontal", ticks=[0, 1])
    scale.outline.set_linewidth(0.4)
    axes.set_xticklabels(ends, fontsize=7, color=SOFT)
    axes.tick_params(length=2, width=0.4, pad=1.5)
    axes.set_xlabel(name, fontsize=7, color=SOFT, labelpad=1)


def fill(sheet: Axes, places: Sequence[tuple[Rectangle, str]], edge: str) -> None:
    """Draw every rectangle in its colour, all of them as one collection."""
    patches, colours = [patch for patch, _ in places], [colour for _, colour in places]
    sheet.add_collection(PatchCollection(patches, facecolors=colours, edgecolors=edge, linewidths=0.4), autolim=False)


def write(sheet: Axes, x: float, y: float, text: str, *, color: str = INK, **style: Any) -> None:
    """Text as it is: no mathematics between dollar signs, whatever the user's settings."""
    style.setdefault("family", families("DejaVu Sans"))
    sheet.text(x, y, drawable(text), color=color, parse_math=False, usetex=False, **style)


@lru_cache
def families(first: str = "DejaVu Sans Mono") -> list[str]:
    """The fonts to take glyphs from, in order: the first, then the fallbacks that this machine has."""
    present = {entry.name for entry in font_manager.fontManager.ttflist}
    return [first, *(name for name in FALLBACK_FONTS if name in present and name != first)]


@lru_cache(maxsize=4096)
def _has_glyph(character: str) -> bool:
    paths = (font_manager.findfont(family) for family in families())
    return any(font_manager.get_font(path).get_char_index(ord(character)) for path in paths)


def drawable(text: str) -> str:
    """The text without marks of no width that no font draws, and a box for every glyph that no font here
    has."""
    return "".join(character if _has_glyph(character) else "" if _width(character) == 0 else "□" for character in text)


def _width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def letters(text: str) -> int:
    """How many characters of a monospaced font the text is wide: 2 for a wide glyph, 0 for a mark of no width."""
    return sum(map(_width, text))
