"""Attention maps as a figure: nothing overlaps, cells and strips are the weights, and omissions are stated.

Attention maps as a page: safe, complete within its budget, and the same without a script.
"""

from __future__ import annotations

import base64
import itertools
import json
import re

import numpy as np
import pytest
from attended import HOSTILE, IMAGE, make, make_text, words
from drawn import drawn, labels, outside, overlapping, panels_of, signed_levels
from exhaustive import few
from matplotlib.colors import to_hex

from ssmscope.api.results import TABLE_ROWS
from ssmscope.errors import InputError
from ssmscope.interp.attention import figure as attention_figure
from ssmscope.interp.attention import result as views
from ssmscope.interp.attention.maps import AttendedText, causal, limit, mean_map, row_limits, strongest
from ssmscope.interp.attention.triangles import strongest_of_blocks
from ssmscope.render import token_maps
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


@pytest.mark.parametrize(
    "layout",
    few(
        LAYOUTS,
        *("49 maps", "12 labelled maps", "odd tokens", "pictures"),
    ),
)
def test_nothing_overlaps_or_is_cut_off_in_the_figure(layout):
    figure, texts = drawn(make(LAYOUTS[layout](), make_text(3)))
    assert not overlapping(texts) and not outside(figure, texts)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["−limit", "0", "limit"]


@pytest.mark.parametrize("tokens", [8, 40])
def test_axes_are_named_below_the_maps_of_a_single_text(tokens):
    figure, texts = drawn(make(make_text(tokens, maps=2)))
    assert not overlapping(texts) and not outside(figure, texts)
    assert [text for text, _ in texts].count("key") == [text for text, _ in texts].count("query") == 2


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


def test_cells_of_a_pooled_map_lie_between_their_edges():
    text = make_text(23, cells=5, sink=True)
    figure = make(text).figure()
    (axes,) = [axes for axes in figure.axes if axes.get_xlabel() == "key, position"]
    mesh, state = axes.collections
    assert mesh.get_coordinates()[0, :, 0].tolist() == mesh.get_coordinates()[:, 0, 1].tolist() == text.edges.tolist()
    assert (mesh.get_array().mask == ~causal(text)).all() and state.get_array().shape == (5, 1)


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


@pytest.mark.parametrize(("length", "labelled"), [(8, True), (60, True), (61, False)])
def test_short_texts_are_written_along_both_axes(length, labelled):
    text = make_text(length, span=(2, 4))
    shown = labels(make(text).figure())
    for token in set(text.tokens):
        count = 2 * text.tokens.count(token) if labelled else text.tokens.count(token)
        assert shown.count(token.strip()) == count
    assert ("key, position" in shown) == (not labelled) and "marked: tokens 2–3" in shown


def test_odd_tokens_are_written_as_the_other_views_write_them():
    shown = labels(make(make_text(tokens=("<s>", *HOSTILE))).figure())
    assert {"↵", "⇥", '"q" $x$', "[bold]no", "&amp;", "antidi…nd-more"} <= set(shown)
    assert not any(character in text for text in shown for character in "\u202e\x1b\n")


def test_both_ends_of_the_scale_are_labelled_and_clipping_is_said():
    clipped, whole = make_text(60), make_text(8)
    for text, less, more in ((clipped, "≤ −", "≥ "), (whole, "−", "")):
        end, largest = limit(text.maps[0], text)
        shown = labels(make(text).figure())
        assert f"{less}{number(end)}" in shown and f"{more}{number(end)}" in shown
        assert (f"layer 0 ±{number(end)}, largest {number(largest)}" in shown) == (text is clipped)
    nothing = make_text(5)
    nothing.maps[0].values[:] = 0
    assert "layer 0 all weights are 0" in labels(make(nothing).figure())


def test_every_map_has_its_title_and_limits():
    text = make_text(20, maps=13, head="5")
    shown = labels(make(text).figure())
    for map_ in text.maps:
        end = number(limit(map_, make_text(20))[0])
        assert any(text.startswith(f"layer {map_.layer} · head 5 ±{end}") for text in shown)


def test_figures_hold_so_many_maps_and_4_texts_and_say_so(monkeypatch):
    monkeypatch.setattr(attention_figure, "MAPS_PER_FIGURE", 8)
    shown = labels(make(make_text(6, maps=10)).figure())
    layers = [text.split(" ±")[0] for text in shown if text.startswith("layer ")]
    assert layers == [f"layer {at}" for at in range(8)] and any("2 more maps" in text for text in shown)
    result = make(*[make_text(4, maps=3)] * 6)
    shown = labels(result.figure())
    assert any("texts 0–3 of 6" in text for text in shown) and sum("1 more map;" in text for text in shown) == 4
    assert any("texts 4–5 of 6" in text for text in labels(result.figure(start=4)))
    for start in (-1, 6):
        with pytest.raises(InputError, match=f"there is no text {start} to start"):
            result.figure(start=start)


def test_chosen_queries_are_drawn_over_the_text():
    text = make_text(30, rows=[4, 20], sink=True)
    figure = make(text).figure()
    shown = labels(figure)
    assert "<s>" in shown and shown.count("this") == 2 and not pictures(figure)
    assert any("query 20" in text for text in shown) and f"state {number(float(text.maps[0].sink[1]))}" in shown
    assert "drama" not in shown and " drama" in text.tokens  # it comes after both queries


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


def data_of(page):
    """Return the data of a page's script, as the script reads it: up to the first thing that closes its element."""
    (found,) = re.findall(r'<script type="application/json">(.*?)</script', page, flags=re.DOTALL)
    return json.loads(found)


def test_page_is_escaped_and_self_contained():
    hostile = [*HOSTILE, "<script>alert(1)</script>"]
    text = make_text(tokens=("<s>", *hostile), span=(2, 4), part="</script><script>alert(2)</script>")
    text = AttendedText(**{**vars(text), "answer": "<i>bad</i>"})
    page = make(text, model="<b>x</b>").to_html()
    assert page.count("<script") == page.count("</script") == 2  # the data and the code
    assert "<i>bad" not in page and "<b>x" not in page and "&lt;script&gt;alert(1)" in page and "<!--" not in page
    assert not re.search(r"https?://|@import|url\(|\beval\b|innerHTML|fetch\(", page)
    assert set(re.findall(r'src="([^"]{10})', page)) == {"data:image"}
    assert "\u202e" not in page and not {c for c in page if ord(c) < 32} - {"\n"}
    assert data_of(page)["texts"][0]["maps"][0]["name"].endswith("</script><script>alert(2)</script>")
    assert "prefers-color-scheme: dark" in page


@pytest.mark.parametrize("options", [{}, {"rows": [3, 11]}, {"cells": 5}])
def test_embedded_maps_are_the_weights_in_eight_bits(options):
    text = make_text(17, sink=True, **options)
    text.maps[0].values[0] = 0
    (found,) = data_of(make(text)._repr_html_())["texts"]
    (packed,) = found["maps"]
    ends = np.frombuffer(base64.b64decode(packed["ends"]), "<f4")
    np.testing.assert_allclose(ends, row_limits(text.maps[0], text), rtol=1e-6)
    named = np.frombuffer(base64.b64decode(packed["keys"]), "<i4").reshape(len(text.queries), -1)
    exact = np.frombuffer(base64.b64decode(packed["weights"]), "<f4").reshape(named.shape)
    for row in range(len(named)):  # as they are, not in eight bits
        wanted = strongest(text.maps[0], row, text, views.NAMED_KEYS)
        kept = named[row] > -2
        assert [*zip(named[row][kept].tolist(), exact[row][kept].tolist())] == wanted
    whole = np.frombuffer(base64.b64decode(packed["rows"]), np.int8).astype(float)
    scale = np.frombuffer(base64.b64decode(packed["scale"]), "<f4")
    cells = range(17) if text.edges is None else text.edges[:-1].tolist()
    at = 0
    for row, query in enumerate(text.queries):
        keys = sum(begin <= query for begin in cells)
        values = text.maps[0].values[row]
        np.testing.assert_allclose(
            whole[at : at + keys] * scale[row] / 127, values[:keys], atol=np.abs(values).max() / 254 + 1e-9
        )
        at += keys
    assert at == len(whole) and found["queries"] == text.queries.tolist()
    assert found["edges"] == (None if text.edges is None else text.edges.tolist())
    assert np.frombuffer(base64.b64decode(packed["sink"]), "<f4").tobytes() == text.maps[0].sink.tobytes()
    assert (packed["end"], packed["largest"]) == limit(text.maps[0], text)


def test_every_token_is_in_the_page_with_its_place():
    text = make_text(9, rows=[3, 8], span=(1, 3))
    page = make(text).to_html()
    places = re.findall(r'<span data-i="(\d+)" class="([^"]*)"( tabindex="-1")?>([^<]*)</span>', page)
    assert [int(place) for place, *_ in places] == list(range(9))
    assert [token for *_, token in places][1:] == [token.strip() for token in text.tokens[1:]]
    assert [i for i, (_, names, focus, _) in enumerate(places) if "asked" in names and focus] == [3, 8]
    assert [i for i, (_, names, *_) in enumerate(places) if "marked" in names] == [1, 2]
    assert "special" in places[0][1] and 'class="state"' not in page


def test_the_page_opens_on_the_mean_of_several_maps():
    text = make_text(12, maps=3)
    page = make(text)._repr_html_()
    (found,) = data_of(page)["texts"]
    assert [one["name"] for one in found["maps"]] == ["mean of |weight| over 3 maps", "layer 0", "layer 1", "layer 2"]
    assert found["maps"][0]["largest"] == float(np.abs(mean_map(text).values).max())
    assert "chosen = queries.length - 1" in page  # the query of the table of readouts
    assert 'type="checkbox" checked' in page


def test_texts_share_the_weights_of_a_page_map_by_map(monkeypatch):
    result = make(make_text(40, maps=5), make_text(40, maps=2), make_text(10))
    whole, small = 40 * 41 // 2, 10 * 11 // 2
    monkeypatch.setattr(token_maps, "MAX_PAGE_WEIGHTS", 4 * whole + small)  # with their means of 6 and 3 maps
    page = result.to_html()
    assert [len(text["maps"]) for text in data_of(page)["texts"]] == [2, 2, 1]
    assert "the first 2 of 6 maps; the files hold all" in page and "the first 2 of 3 maps" in page
    assert [f'<option value="{at}">layer 0</option>' in page for at in (0, 1, 2)] == [True, True, False]
    monkeypatch.setattr(token_maps, "MAX_PAGE_WEIGHTS", whole + small)  # the smaller one still fits
    assert [text and len(text["maps"]) for text in data_of(result.to_html())["texts"]] == [1, None, 1]


def test_long_texts_are_only_in_the_picture(monkeypatch):
    monkeypatch.setattr(token_maps, "MAX_PAGE_TOKENS", 20)
    page = make(make_text(21), make_text(20))._repr_html_()
    assert data_of(page)["texts"][0] is None and data_of(page)["texts"][1]["length"] == 20
    assert "A text of 21 tokens is too long to be shown token by token" in page
    assert page.count('class="tokens"') == 1 and "As a picture" not in page and page.count("data:image/png") == 1
    assert "As a picture" in make(make_text(20))._repr_html_()  # folded away where the view has all


def test_pieces_on_one_page_do_not_meet():
    one = make(make_text(5))
    piece = one._repr_html_()
    assert piece == one._repr_html_()
    code = re.findall(r"<script>(.*?)</script>", piece, flags=re.DOTALL)[0].strip()
    assert code.startswith("(() => {") and code.endswith("})();") and "window." not in code and "globalThis" not in code
    assert '".ssmscope-attention:not([data-live])"' in code and "dataset.live" in code  # each is started once
    assert not re.search(r'\bid="', piece)


def test_without_a_script_there_is_the_picture():
    piece = make(make_text(5))._repr_html_()
    assert "<noscript>" in piece and '<div hidden class="live">' in piece
    picture = re.findall(r"As a picture.*?base64,([^\"]+)\"", piece, flags=re.DOTALL)[0]
    assert base64.b64decode(picture).startswith(b"\x89PNG")


def test_images_are_written_as_pixels_in_their_places():
    page = make(make_text(21, rows=[7, 20], pixels=IMAGE, sink=True))._repr_html_()
    grid = re.findall(r'<div class="grid".*?</div>', page, flags=re.DOTALL)[0]
    assert grid.count("data-i=") == 20 and "repeat(5, 16px)" in grid and 'data-i="20"' in page
    assert page.count("data:image/png") == 2 and 'class="state"' in page  # the image and the figure


def test_the_table_of_readouts_is_there_and_bounded(monkeypatch):
    monkeypatch.setattr(attention_figure, "MAPS_PER_FIGURE", 2)  # of the picture
    text = make_text(9, maps=TABLE_ROWS + 1)
    page = make(text)._repr_html_()
    found = text.maps[1].readouts
    table = re.findall(r"<table.*?</table>", page, flags=re.DOTALL)[0]
    rows = [re.sub(r"<[^>]+>", " ", row).split() for row in re.findall(r"<tr>.*?</tr>", table, flags=re.DOTALL)]
    assert " ".join(rows[0]) == "text map tokens back last 4 first 4 strongest for the last query"
    wanted = ["0", "layer", "1", f"{found.distance:.1f}", f"{found.recent:.3f}", f"{found.sink:.3f}"]
    assert rows[2][:6] == wanted and len(rows) == 1 + TABLE_ROWS
    assert f"{TABLE_ROWS} of {TABLE_ROWS + 1} rows" in page and "off the mark" not in page
    assert "off the mark" in make(make_text(9, span=(1, 2)))._repr_html_()
