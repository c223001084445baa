"""Figures as files, with the same bytes for the same figure, for pages and for papers."""

from __future__ import annotations

import base64
import io
import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_SVG_BYTES = 300_000

DOTS_PER_INCH = 150

PHOTO = "photo"
"""Group of axes that show a photo, whose colours stay on a dark page."""
DARKEN = np.array([[0.494, -1.230, -0.124], [-0.366, -0.370, -0.124], [-0.366, -1.230, 0.736]])
"""Change of a pixel's colours (red, green, blue) by the stylesheet's filter for dark pages, invert(0.93)
hue-rotate(180deg): −0.86 times the matrix of a rotation by 180°, to which 0.93 is added."""

_CLIP = re.compile(rb'(?<=url\(#)p[0-9a-f]{10}(?=\))|(?<=<clipPath id=")p[0-9a-f]{10}(?=")')

_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}


def encode_figure(figure: Figure, suffix: str) -> bytes:
    """Return the figure as "png", "svg" (with letters as outlines, so that it looks the same everywhere) or "pdf"."""
    import matplotlib

    buffer = io.BytesIO()
    # Without the salt every SVG gets other ids, and drawing a figure twice makes two different files.
    with matplotlib.rc_context({"svg.hashsalt": "ssmscope", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=suffix, dpi=DOTS_PER_INCH, metadata=_UNDATED[suffix])
    # matplotlib names a clipping path after its unrounded corners, whose last digits differ from layout to layout.
    numbers: dict[bytes, int] = {}
    return _CLIP.sub(lambda at: b"p%d" % numbers.setdefault(at[0], len(numbers)), buffer.getvalue())


def data_uri(figure: Figure, *, vector: bool = True) -> str:
    """Return the figure for the `src` of an image, in which ids cannot clash with those of the page: an SVG if it is
    `vector` and not too large, else a PNG."""
    if vector:
        svg = encode_figure(figure, "svg")
        if len(svg) <= MAX_SVG_BYTES:
            return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    return f"data:image/png;base64,{base64.b64encode(encode_figure(figure, 'png')).decode()}"


def dark_data_uri(figure: Figure) -> str:
    """Return the figure as a PNG for dark pages, darkened like the others but for its photos."""
    from PIL import Image

    light = np.asarray(Image.open(io.BytesIO(encode_figure(figure, "png"))).convert("RGB"))
    dark = ((light / 255 @ DARKEN.T + 0.93).clip(0, 1) * 255).round().astype(np.uint8)
    for axes in (axes for axes in figure.axes if axes.get_gid() == PHOTO):
        ends = np.array(axes.get_window_extent().extents) * (len(light) / figure.bbox.height)
        left, bottom, right, top = ends.round().astype(int).tolist()
        rows, columns = slice(len(light) - top, len(light) - bottom), slice(left, right)
        dark[rows, columns] = light[rows, columns]
    buffer = io.BytesIO()
    Image.fromarray(dark).save(buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
