"""Letters in figures: fonts that have the glyphs of a text, and the width of a text."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

from matplotlib import font_manager
from ssmscope.render.tokens import shorten, visible

MAX_NAME_LETTERS = 28
FALLBACK_FONTS = (
    *("DejaVu Sans Mono", "DejaVu Sans", "Noto Sans Mono CJK SC", "Noto Sans CJK SC", "Noto Sans CJK JP"),
    *("Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "IPAGothic", "PingFang SC"),
    *("Hiragino Sans", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Arial Unicode MS"),
    *("Noto Emoji", "Symbola", "Segoe UI Symbol"),
)


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
    return "".join(c if c == "\n" or _has_glyph(c) else "□" * min(_width(c), 1) for c in text)


def _width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def letters(text: str) -> int:
    """Return the width of a text in monospaced characters: 2 for a wide glyph, 0 for a mark without width."""
    return sum(map(_width, text))


def short_name(name: str, most: int = MAX_NAME_LETTERS) -> str:
    """Return a user's name as it is drawn, in at most so many letters."""
    return drawable(shorten(visible(name), most))
