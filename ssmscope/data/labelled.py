"""Labelled examples for a classifier, from a known data set or a user's file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ssmscope.data import pixels
from ssmscope.data.pixels import PixelData, load_pixels
from ssmscope.data.rows import SUFFIXES
from ssmscope.data.text import SOURCES, TextData, load_text
from ssmscope.errors import InputError, did_you_mean

KNOWN = (*pixels.KNOWN, *SOURCES)
"""Names that `load_labelled` knows."""


def load_labelled(
    data: str | Path, split: str | None = None, *, label_names: Sequence[str] | None = None
) -> PixelData | TextData:
    """Load one split of a known data set of images or texts, or the texts of a file (`load_pixels`, `load_text`).

    Raises:
        InputError: for an unknown name, and whatever those two refuse.
    """
    if data in pixels.KNOWN:
        return load_pixels(str(data), split)
    path = Path(data)
    if data not in SOURCES and path.suffix.lower() not in SUFFIXES and not os.path.exists(path):
        raise InputError(
            f"unknown data '{data}'; give one of {', '.join(KNOWN)}, or a file ending in {', '.join(SUFFIXES)}"
            f"{did_you_mean(str(data), KNOWN)}"
        )
    return load_text(data, split, label_names=label_names)
