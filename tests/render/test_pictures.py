"""Pictures on dark pages: darkened as the stylesheet does it, with photos in their own colours."""

import base64
import io

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from ssmscope.render.blocks import Picture
from ssmscope.render.html import block_html
from ssmscope.render.pictures import DARKEN, PHOTO, dark_data_uri

RED, BLUE = (200, 30, 40), (32, 101, 168)


def drawn() -> Figure:
    figure = Figure(figsize=(2, 1))
    photo, other = figure.subfigures(1, 2)
    for part, colour in ((photo, RED), (other, BLUE)):
        axes = part.add_axes((0.1, 0.1, 0.8, 0.8))
        axes.imshow(np.full((2, 2, 3), colour, np.uint8), aspect="auto")
        axes.set_gid(PHOTO if part is photo else None)
    return figure


@pytest.mark.usefixtures("painted")
def test_a_photo_keeps_its_colours_and_all_else_is_darkened() -> None:
    found = Image.open(io.BytesIO(base64.b64decode(dark_data_uri(drawn()).partition(",")[2])))
    pixels = np.asarray(found).astype(int)
    high, wide, _ = pixels.shape
    assert pixels[high // 2, wide // 4].tolist() == list(RED)
    assert pixels[0, 0].tolist() == [18] * 3  # White, 0.93 − 0.86.
    assert np.abs(pixels[high // 2, 3 * wide // 4] - 255 * (0.93 + DARKEN @ np.array(BLUE) / 255)).max() <= 1


def test_the_colours_are_those_of_the_stylesheets_filter() -> None:
    """A hue is turned by 180° about the grey axis, with luminance 0.213, 0.715 and 0.072."""
    luminance = np.array([[0.213, 0.715, 0.072]] * 3)
    np.testing.assert_allclose(DARKEN, (1 - 2 * 0.93) * (2 * luminance - np.eye(3)), atol=1e-3)


def test_a_page_has_the_darker_picture_of_a_photo_alone() -> None:
    light, both = (str(block_html(Picture(drawn, "a", vector=False, photo=photo))) for photo in (False, True))
    assert "<picture>" not in light and light.count("data:image/png") == 1
    assert both.count("data:image/png") == 2 and 'media="screen and (prefers-color-scheme: dark)"' in both
