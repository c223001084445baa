"""Attention maps as table, files and terminal text: complete, blank where nothing is, safe and bounded."""

import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from attended import HOSTILE, make, make_map, make_text
from seen import render
from ssmscope.interp.attention import result as attention
from ssmscope.interp.attention.maps import AttendedText, AttentionMap, limit, mean_maps, row_limits


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("options", [{}, {"rows": [3, 11]}, {"cells": 5}])
def test_the_frame_is_the_strongest_keys_of_every_query(monkeypatch, sink, options):
    monkeypatch.setattr(attention, "KEYS_PER_QUERY", 4)
    result = make(make_text(12, maps=2, sink=sink, **options), make_text(5, part="conv", head="3"))
    frame = result.to_frame()
    rows = []
    for at, text in enumerate(result):
        begins = range(len(text)) if text.edges is None else text.edges[:-1].tolist()
        for each in text.maps:
            for row, query in enumerate(text.queries.tolist()):
                begin = max(one for one in begins if one <= query)
                found = [(one, each.values[row, i]) for i, one in enumerate(begins) if one <= query]
                found += [(-1, each.sink[row])] if each.sink is not None else []
                for key, weight in sorted(found, key=lambda pair: (-abs(pair[1]), pair[0]))[:4]:
                    rows.append(
                        ("demo/test", at, each.layer, each.part, each.head, begin, text.tokens[begin], key, weight)
                    )
    names = ["model", "text", "layer", "part", "head", "query", "query_token", "key", "weight"]
    assert list(frame[names].itertuples(index=False, name=None)) == rows
    for row in frame.itertuples():
        if row.key < 0:
            assert pd.isna(row.key_token)
        else:
            assert row.key_token == result[row.text].tokens[row.key]
    assert list(frame) == [*names[:8], "key_token", "weight"]


def test_colours_end_at_the_percentile_of_what_can_be_attended_to():
    text = make_text(60, sink=True)
    (only,) = text.maps
    weights = np.abs(np.concatenate([only.values[np.tril_indices(60)], only.sink]))
    end, largest = limit(only, text)
    assert largest == weights.max() and end < largest
    assert np.mean(weights <= end) >= 0.995 > np.mean(weights < end)
    small = make_text(8)
    assert limit(small.maps[0], small)[0] == np.abs(small.maps[0].values).max()
    sparse = AttentionMap("0", "", "mean", np.where(np.arange(60) == 3, np.eye(60) * 0.5, 0), None, only.readouts)
    assert limit(sparse, make_text(60)) == (0.5, 0.5)  # not the percentile, which is zero
    assert limit(AttentionMap("0", "", "mean", np.zeros((60, 60)), None, only.readouts), make_text(60)) == (0, 0)


def test_the_colours_of_each_row_end_at_its_own_percentile():
    """The 99.5th percentile leaves at most two of 400 keys out; the state before the first token is counted too."""
    text = make_text(400)
    values = np.tril(np.arange(1, 401)[None, :] * np.where(np.arange(400) % 2, -1.0, 1.0)[:, None])
    whole = AttentionMap("0", "", "mean", values, None, text.maps[0].readouts)
    ends = row_limits(whole, text)
    assert ends.dtype == np.float64 and ends.shape == (400,)
    assert ends[[0, 1, 99, 199]].tolist() == [1, 2, 100, 200] and ends[[250, 399]].tolist() == [250, 399]
    with_state = row_limits(replace(whole, sink=np.linspace(0, -1000, 400)), text)
    assert with_state[99] == pytest.approx(99 * 1000 / 399) and with_state[399] == 399


def test_the_mean_of_several_maps_is_of_absolute_values():
    text = make_text(12, maps=3, sink=True)
    (mean,) = mean_maps(text)
    np.testing.assert_allclose(mean.values, sum(np.abs(each.values) for each in text.maps) / 3, rtol=1e-6)
    np.testing.assert_allclose(mean.sink, sum(np.abs(each.sink) for each in text.maps) / 3, rtol=1e-6)
    assert mean_maps(alone := make_text(12)) == [alone.maps[0]]
    parts = [*make_text(12, maps=2).maps, make_map(12, text.queries, None, part="kept")]
    with_parts = AttendedText(**{**vars(text), "maps": tuple(parts)})
    np.testing.assert_allclose(mean_maps(with_parts)[0].values, sum(np.abs(each.values) for each in parts[:2]) / 2)


def test_a_hybrid_has_a_finding_of_its_recurrences_and_one_of_its_attention():
    """Softmax weights are on another scale: each kind is pooled by itself, over all heads, and names its layers."""
    text = make_text(4)

    def map_(layer, head, weights):
        values = np.zeros((4, 4), dtype=np.float32)
        values[-1] = weights
        return replace(text.maps[0], layer=layer, head=head, values=values)

    small, heads = np.array([0, 0, -1, 1]) * 1e-4, ([0.2, 0.8, 0, 0], [1, 0, 0, 0])
    maps = (map_("0", "mean", small), map_("1", "mean", small * [0, 0, 3, 1]))
    maps += tuple(map_("2 attention", str(head), weights) for head, weights in enumerate(heads))
    both = replace(text, maps=maps)
    recurrent, softmax = mean_maps(both)
    np.testing.assert_allclose(recurrent.values[-1], [0, 0, 2e-4, 1e-4], rtol=1e-6)
    np.testing.assert_allclose(softmax.values[-1], [0.6, 0.4, 0, 0])
    headline = make(both).headline
    first, second = (f"“{both.tokens[at].strip()}” most" for at in (2, 0))
    assert f"{first} (67 %), then itself (33 %) in layers 0–1, and {second} (60 %)" in headline
    assert "in layer 2 (attention)" in headline and len(attention.query_rows(make(both)).texts[0].rows) == 2
    (alone,) = mean_maps(replace(both, maps=maps[2:]))
    np.testing.assert_allclose(alone.values, softmax.values)


def test_terminal_shows_hostile_tokens_harmlessly():
    result = make(make_text(tokens=("<s>", *HOSTILE)), model="\x1b[31m")
    for options in ({"color_system": None}, {"force_terminal": True, "color_system": "truecolor", "no_color": False}):
        shown = render(result, width=110, **options)
        assert "\x1b[31m" not in shown and "\u202e" not in shown and "of ␛[31m: the last token" in shown
    assert "[bold]no" in shown and "⟨202E⟩evil" in shown  # the coloured text has every token
    assert "96–99 " in render(make(make_text(100, cells=8)), color_system=None)


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
