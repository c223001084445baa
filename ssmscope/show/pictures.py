"""Figures as files, the same bytes for the same figure: for pages and for papers."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST = 300_000
"""Up to how many bytes a page takes a figure as SVG; what is larger is a PNG."""

DOTS = 150
"""Of a PNG, per inch."""

_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}


def drawn(figure: Figure, suffix: str) -> bytes:
    """The figure as "png", "svg" (its letters as outlines, so that it looks alike everywhere) or "pdf"."""
    import matplotlib

    buffer = io.BytesIO()
    # Without the salt every SVG gets other ids; the same figure twice would be two different files.
    with matplotlib.rc_context({"svg.hashsalt": "ssmscope", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=suffix, dpi=DOTS, metadata=_UNDATED[suffix])
    return buffer.getvalue()


def data_uri(figure: Figure, *, vector: bool = True) -> str:
    """The figure for the `src` of an image: an SVG if it is `vector` and not too large, else a PNG.

    In an image, the ids of an SVG are its own: none can clash with those of another figure or of the page.
    """
    if vector:
        svg = drawn(figure, "svg")
        if len(svg) <= LARGEST:
            return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    return f"data:image/png;base64,{base64.b64encode(drawn(figure, 'png')).decode()}"
