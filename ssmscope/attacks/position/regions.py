"""Regions of a sequence, in tokens or in percent of each text's own tokens, and sliding windows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ssmscope.errors import InputError

_BOUNDS = re.compile(r"(-?\d+(?:\.\d+)?)(%?):(-?\d+(?:\.\d+)?)(%?)", re.ASCII)
ROUNDING = 1e-9
"""Tolerance for shares: 29 % of 100 tokens is computed as 28.999999999999996."""
EXAMPLE = "write start:stop in tokens, 0:32, or in percent, 0%:10%"


@dataclass(frozen=True)
class Region:
    """Tokens from `start` up to, but not including, `stop`; in percent of a sequence's tokens if `percent`."""

    start: float
    stop: float
    percent: bool = False

    def __str__(self) -> str:
        unit = "%" if self.percent else ""
        return f"{self.start:.12g}{unit}:{self.stop:.12g}{unit}"

    def bounds(self, length: int) -> tuple[int, int]:
        """Return the first token and the one after the last; shares are rounded down and have at least one token."""
        if not self.percent:
            return int(self.start), int(self.stop)
        start, stop = (math.floor(length * share / 100 + ROUNDING) for share in (self.start, self.stop))
        start = min(start, length - 1)
        return start, max(stop, start + 1)


def check_places(*, regions: Any, window: Any, stride: Any, **others: Any) -> None:
    """Raise InputError if regions or windows fit no sequence at all, or if there is a stride without a window."""
    if stride is not None and window is None:
        raise InputError("stride=… was given without window=…; give both")
    if regions is not None:
        regions_of(regions, math.inf)
    if window is not None:
        _sizes(window, stride)


def regions_of(given: str | Sequence[str | tuple[float, float]], length: float) -> tuple[Region, ...]:
    """Parse regions from pairs (start, stop) of tokens or from text, "0:32,50%:100%", within the longest sequence."""
    parts = given.split(",") if isinstance(given, str) else list(given)
    if not parts:
        raise InputError(f"no region was given; {EXAMPLE}")
    regions = tuple(_region(part, length) for part in parts)
    if twice := [region for region in regions if regions.count(region) > 1]:
        raise InputError(f"region {twice[0]} was given twice; give each region once")
    return regions


def _region(part: str | tuple[float, float], length: float) -> Region:
    text = part.strip() if isinstance(part, str) else ":".join(map(str, part))
    found = _BOUNDS.fullmatch(text)
    if found is None or found[2] != found[4]:
        raise InputError(f"{text!r} is not a region; {EXAMPLE}")
    start, stop, percent = float(found[1]), float(found[3]), found[2] == "%"
    region = Region(start, stop, percent)
    if not percent and not (start.is_integer() and stop.is_integer()):
        raise InputError(f"region {text} is not in whole tokens; {EXAMPLE}")
    end = 100 if percent else length
    if not 0 <= start < stop <= end:
        unit = f"{end} %" if percent else f"{end:,}, the tokens of the longest sequence"
        within = f" or not within 0 to {unit}" if math.isfinite(end) else ""
        raise InputError(f"region {text} is empty{within}; {EXAMPLE}")
    return region


def windows_of(window: str | int, stride: str | int | None, length: int) -> tuple[Region, ...]:
    """Return windows `stride` apart (by default a window's width) from the first token on, the last one at the end."""
    width, step, percent = _sizes(window, stride)
    end = 100.0 if percent else float(length)
    if width > end:
        raise InputError(f"window {window} is longer than the longest sequence, of {length:,} tokens; shorten it")
    starts = [step * at for at in range(math.floor((end - width) / step) + 1)]
    if starts[-1] + width < end - ROUNDING:
        starts.append(end - width)
    return tuple(Region(start, start + width, percent) for start in starts)


def _sizes(window: str | int, stride: str | int | None) -> tuple[float, float, bool]:
    """Parse width and stride; return them and True if both are in percent."""
    width, percent = _size(window, "window")
    step, like = (width, percent) if stride is None else _size(stride, "stride")
    if percent != like:
        raise InputError(f"window {window} and stride {stride}: give both in tokens or both in percent")
    return width, step, percent


def _size(given: str | int, name: str) -> tuple[float, bool]:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", str(given).strip(), re.ASCII)
    size = float(found[1]) if found else 0.0
    if found is None or size <= 0 or not (found[2] or size.is_integer()):
        raise InputError(f"{name} is {given!r}; allowed is a whole number of tokens from 1 on, or a share such as 10%")
    return size, found[2] == "%"
