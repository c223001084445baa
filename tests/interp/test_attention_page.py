"""Attention maps as a page: safe, complete within its budget, and the same without a script."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest
from attended import HOSTILE, IMAGE, make, make_text

from ssmscope.api.results import TABLE_ROWS
from ssmscope.interp.attention import figure as attention_figure
from ssmscope.interp.attention import result as views
from ssmscope.interp.attention.maps import AttendedText, limit, mean_map, row_limits, strongest
from ssmscope.render import token_maps


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
