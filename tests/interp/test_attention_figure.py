"""Attention maps as a figure: nothing overlaps, cells and strips are the weights, and omissions are stated."""

import itertools

import numpy as np
import pytest
from attended import HOSTILE, IMAGE, make, make_text, words
from drawn import drawn, labels, outside, overlapping, panels_of, signed_levels
from exhaustive import few
from matplotlib.colors import to_hex
from ssmscope.interp.attention.maps import limit, row_limits
from ssmscope.interp.attention.triangles import strongest_of_blocks
from ssmscope.render.colours import SIGNED, STEPS, ramp, signed_shades
from ssmscope.render.figure import EMPTY
from ssmscope.render.numbers import number
from ssmscope.render.token_figure import PIXEL_SHADES

LAYOUTS = {
    **{f"{n} tokens": lambda n=n: make_text(n, sink=True, span=(0, 1)) for n in (1, 2, 8, 59, 60, 61, 1024)},
    **{
        f"{m} maps": lambda m=m: make_text(20, maps=m, sink=True, head="0–95", part="conv")
        for m in (2, 3, 4, 12, 24, 49)
    },
    "24 long maps": lambda: make_text(300, maps=24, sink=True, span=(20, 60)),
    "12 labelled maps": lambda: make_text(12, maps=12, sink=True),
    "odd tokens": lambda: make_text(tokens=("<s>", *HOSTILE, "w" * 300), sink=True, span=(2, 5)),
    "cells": lambda: make_text(301, cells=16, maps=2, sink=True, span=(33, 60)),
    "boxes": lambda: make_text(tokens=("<s>", *HOSTILE, *words(40)), rows=[5, 50], maps=2, sink=True, span=(2, 5)),
    "bars": lambda: make_text(900, rows=[100, 899], maps=3, sink=True, span=(20, 60)),
    "many rows": lambda: make_text(50, rows=list(range(1, 49)), maps=2),
    "pictures": lambda: make_text(
        21, rows=[7, 20], maps=4, sink=True, pixels=np.zeros((4, 5, 1), np.float32), part="conv", head="5"
    ),
}


@pytest.mark.parametrize("layout", few(LAYOUTS, *("12 labelled maps", "odd tokens", "pictures")))
def test_nothing_overlaps_or_is_cut_off_in_the_figure(layout):
    figure, texts = drawn(make(LAYOUTS[layout](), make_text(3)))
    assert not overlapping(texts) and not outside(figure, texts)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["−limit", "0", "limit"]


def pictures(figure):
    """The arrays that are drawn as maps, the column of the state left out."""
    return [image.get_array() for axes in panels_of(figure) for image in axes.images if image.get_array().shape[1] > 1]


def test_what_comes_after_the_query_is_blank_and_not_zero():
    text = make_text(20, sink=True)
    text.maps[0].values[7, 2] = 0
    figure = make(text).figure()
    (shown,) = pictures(figure)
    above = np.triu(np.ones((20, 20), bool), 1)
    assert shown.mask[above].all() and not shown.mask[~above].any() and shown[7, 2] == 0
    np.testing.assert_array_equal(shown[~above], text.maps[0].values[~above])
    (axes,) = [axes for axes in figure.axes if axes.images]
    image, state = axes.images
    end, _ = limit(text.maps[0], text)
    assert image.get_clim() == state.get_clim() == (-end, end)
    assert image.cmap(np.ma.masked_all(1))[0].tolist() == [1, 1, 1, 1] != image.cmap([0.5])[0].tolist()
    np.testing.assert_array_equal(state.get_array()[:, 0], text.maps[0].sink)
    assert state.get_extent()[1] < image.get_extent()[0] == -0.5  # set apart at the left of key 0


def test_long_maps_show_the_strongest_weight_of_every_dot():
    random = np.random.default_rng(0)
    values = random.normal(size=(11, 7))
    values[:4, 3:] = np.nan
    found = strongest_of_blocks(values, 4, 3)
    assert found.shape == (3, 3)
    for row, column in itertools.product(range(3), range(3)):
        block = values[4 * row : 4 * row + 4, 3 * column : 3 * column + 3].ravel()
        block = block[~np.isnan(block)]
        expected = max(block, key=abs) if block.size else np.nan
        np.testing.assert_allclose(found[row, column], expected, rtol=1e-6)
    figure = make(make_text(1024)).figure()
    (shown,) = pictures(figure)
    assert shown.shape == (512, 512) and any("strongest of them" in text for text in labels(figure))
    assert not any("strongest of them" in text for text in labels(make(make_text(700)).figure()))


def test_chosen_queries_of_long_texts_are_strips():
    text = make_text(1000, rows=[300, 999], sink=True)
    figure = make(text).figure()
    strips = [image.get_array()[0] for axes in panels_of(figure) for image in axes.images]
    assert len(strips) == 2
    for row, strip in enumerate(strips):
        query = int(text.queries[row])
        end = row_limits(text.maps[0], text)[row]
        found = signed_shades()
        wanted = [
            found[level + STEPS] for level in signed_levels(text.maps[0].values[row, : query + 1].astype(float), end)
        ]
        assert [to_hex(colour) for colour in strip[: query + 1]] == wanted
        assert len({to_hex(colour) for colour in strip[query + 1 :]}) <= 1  # what comes after is blank
    shown = labels(figure)
    assert any(f"state {number(float(text.maps[0].sink[1]))}" in each for each in shown) and "position" in shown


def test_chosen_queries_of_images_are_pictures():
    text = make_text(21, rows=[7, 20], pixels=IMAGE)
    figure = make(text).figure()
    first, *rows = [axes for axes in figure.axes if axes.images]
    np.testing.assert_allclose(first.images[0].get_array(), IMAGE)
    for axes, row, query in zip(rows, text.maps[0].values, (7, 20)):
        shown = axes.images[0].get_array().reshape(-1, 3)
        end = np.abs(row[: query + 1]).max()
        place = np.rint((row[: query + 1].astype(float) / end + 1) / 2 * (PIXEL_SHADES - 1)).astype(int)
        colours = ramp(SIGNED, PIXEL_SHADES)
        assert [to_hex(colour) for colour in shown[: query + 1]] == [colours[at] for at in place[:20]]
        assert len({to_hex(colour) for colour in shown[query + 1 :]} - {EMPTY}) == 0
    assert [(box.get_x(), box.get_y()) for box in rows[0].patches] == [(1.5, 0.5)]  # pixel 7 is at row 1, column 2
