"""Attention maps as table, files and terminal text: complete, blank where nothing is, safe and bounded."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from attended import HOSTILE, IMAGE, make, make_map, make_text
from drawn import drawn, labels
from seen import luminance, render

from ssmscope.api.results import TABLE_ROWS, Result
from ssmscope.errors import InputError
from ssmscope.interp.attention import figure, triangles
from ssmscope.interp.attention import result as attention
from ssmscope.interp.attention.maps import AttendedText, AttentionMap, causal, limit, mean_map, row_limits, title
from ssmscope.interp.attention.result import KEYS_PER_QUERY, ImplicitAttention, reads_most
from ssmscope.render import token_maps
from ssmscope.render.colours import SIGNED, SIGNED_ON_DARK, STEPS, ink, signed_shades
from ssmscope.render.numbers import number


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


def test_the_frame_holds_no_more_than_it_says():
    frame = make(make_text(KEYS_PER_QUERY + 10)).to_frame()
    counts = frame.groupby("query").size()
    assert counts.tolist() == [min(query + 1, KEYS_PER_QUERY) for query in range(KEYS_PER_QUERY + 10)]
    assert (frame["key"] <= frame["query"]).all()
    assert make().to_frame().empty


def test_summary_has_a_row_per_map():
    result = make(make_text(12, maps=2, span=(1, 3)), make_text(5, head="7"))
    summary = result.summary()
    assert list(summary) == ["model", "text", "layer", "part", "head", "distance", "recent", "sink", "outside"]
    assert summary["text"].tolist() == [0, 0, 1] and summary["head"].tolist() == ["mean", "mean", "7"]
    assert summary["distance"].tolist() == [each.readouts.distance for text in result for each in text.maps]
    assert math.isnan(summary["outside"][2]) and summary["outside"][0] == result[0].maps[0].readouts.outside


def test_maps_are_found_by_name():
    text = make_text(6)
    maps = [make_map(6, text.queries, None, seed=i, layer=str(i // 2), head=str(i % 2)) for i in range(4)]
    result = make(AttendedText(**{**vars(text), "maps": tuple(maps)}), heads="all")
    assert result.map() is maps[0].values and result.map(layer=1) is maps[2].values
    assert result.map(layer="1", head=1) is maps[3].values and len(result) == 1 and result[0].whole
    for options, message in [
        ({"layer": 2}, "no map of layer '2'; allowed are '0', '1'"),
        ({"head": "mean"}, "no map of head 'mean'"),
        ({"part": "conv"}, "no map of part 'conv'; allowed are ''"),
        ({"text": 1}, "there is no text 1; allowed are 0 to 0"),
    ]:
        with pytest.raises(InputError, match=re.escape(message)):
            result.map(**options)


def test_files_round_trip(tmp_path):
    result = make(
        make_text(tokens=("<s>", *HOSTILE), sink=True, span=(2, 4)),
        make_text(30, cells=7),
        make_text(21, rows=[20], pixels=IMAGE),
        make_text(120, maps=2),  # large enough to be compressed
    )
    paths = result.save(tmp_path, "attention")
    again = Result.load(paths["json"])
    assert isinstance(again, ImplicitAttention) and again == result
    for a, b in zip(result, again, strict=True):
        assert a.tokens == b.tokens and a.span == b.span and (a.edges is None) == (b.edges is None)
        for one, other in zip(a.maps, b.maps, strict=True):
            assert one.values.tobytes() == other.values.tobytes() and other.values.dtype == np.float32
    assert paths["html"].read_text() == result.to_html()  # the same every time


def test_headline_names_layers_and_rollout():
    maps = [make_map(4, np.arange(4), None, layer=layer) for layer in ("0", "1", "2", "5", "rollout")]
    text = AttendedText(**{**vars(make_text(4)), "maps": tuple(maps)})
    assert make(text).headline.endswith(" (block level, layers 0–2, 5, rollout)")
    assert make(make_text(4, head="0–95", part="conv")).headline.endswith("(block level, layer 0)")
    by_gradient = make(make_text(4), level="gradient")
    assert by_gradient.headline.endswith(" (attention × gradient, layer 0)")
    assert "Implicit attention of demo/test: attention × gradient" in labels(by_gradient.figure())
    assert (
        title(make_map(4, np.arange(4), None, layer="3", head="0–95", part="conv")) == "layer 3 · conv · channels 0–95"
    )
    assert title(make_map(4, np.arange(4), None, layer="3", head="5")) == "layer 3 · head 5"


def test_headline_names_what_the_last_query_reads_most():
    text = make_text(4)
    (only,) = text.maps
    one = replace(
        only, values=np.array([[9.0, 0, 0, 0], [0, 9, 0, 0], [0, 0, 9, 0], [1, -5, 0.5, 3]], dtype=np.float32)
    )
    tokens = ("a", "film", "so", "dull")
    plain = replace(text, tokens=tokens, maps=(replace(one, sink=None),))
    assert reads_most(plain) == "the last token “dull” reads “film” most (53 %), then itself (32 %) and “a” (11 %)"
    before = replace(plain, maps=(replace(one, sink=np.array([0, 0, 0, 9.5], dtype=np.float32)),))
    assert reads_most(before) == "the last token “dull” reads [state] most (50 %), then “film” (26 %) and itself (16 %)"
    other = replace(one, sink=None, layer="1", values=-one.values[:, ::-1])  # The mean of |weight| decides.
    both = replace(plain, maps=(replace(one, sink=None), other))
    assert reads_most(both).startswith("the last token “dull” reads “film” most (29 %), then")
    third = replace(plain, queries=np.array([2]), maps=(replace(one, sink=None, values=one.values[2:3]),))
    assert reads_most(third) == "token 2 “so” reads itself most (100 %)"
    nothing = replace(plain, maps=(replace(one, sink=None, values=0 * one.values),))
    assert reads_most(nothing) == "the last token “dull” reads nothing"
    assert make(plain).headline == f"Implicit attention of demo/test: {reads_most(plain)} (block level, layer 0)"
    told = make(*[plain] * 5).headline
    assert "text 2: the last" in told and "text 3" not in told and "; 2 more texts (block" in told


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


def test_shades_are_symmetric_around_zero():
    for stops in (SIGNED, SIGNED_ON_DARK):
        colours = signed_shades(stops)
        assert len(colours) == 2 * STEPS + 1 and colours[STEPS] == stops[len(stops) // 2]
        for colour in colours:
            light, dark = sorted((luminance(colour), luminance(ink(colour))), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5
        for level in range(1, STEPS + 1):  # both signs are as far from zero for those who see no hue
            negative, positive = luminance(colours[STEPS - level]), luminance(colours[STEPS + level])
            assert abs(negative - positive) < 0.13


def test_which_keys_a_query_can_attend_to():
    assert (causal(make_text(6)) == np.tril(np.ones((6, 6), bool))).all()
    assert causal(make_text(6, rows=[0, 4])).sum(axis=1).tolist() == [1, 5]
    assert (causal(make_text(11, cells=3)) == np.tril(np.ones((4, 4), bool))).all()


def test_terminal_names_readouts_and_the_strongest_keys():
    result = make(make_text(12, span=(2, 4), sink=True))
    shown = render(result, width=160, color_system=None)
    text, (only,) = result[0], result[0].maps
    pairs = [(text.tokens[i].strip(), only.values[-1, i]) for i in range(12)] + [("[state]", only.sink[-1])]
    top = sorted(pairs, key=lambda pair: -abs(pair[1]))[:5]
    assert " · ".join(f"{token} {number(float(weight))}" for token, weight in top) in " ".join(shown.split())
    for found in (f"{only.readouts.distance:.1f}", f"{only.readouts.sink:.3f}", f"{only.readouts.outside:.3f}"):
        assert found in shown
    assert "marked: tokens 2–3" in shown and "answer “positive” (p = 0.750)" in shown
    assert "tokens back" in shown and "off the mark" in shown and "38;5" not in shown
    assert "last query: 11 “for”" in shown and "Signed mean over channels" in shown
    assert "off the mark" not in render(make(make_text(9)), color_system=None)


def test_narrow_terminals_keep_the_readouts():
    result = make(make_text(30, maps=2, head="12", part="conv", span=(2, 4)))
    for width in (72, 80, 100):
        lines = render(result, width=width, color_system=None).splitlines()
        assert all(len(line.rstrip()) <= width for line in lines)
        for map_ in result[0].maps:
            found = map_.readouts
            numbers = rf" {found.distance:.1f} +{found.recent:.3f} +{found.sink:.3f} +{found.outside:.3f} "
            assert sum(bool(re.search(numbers, line)) for line in lines) == 1


def test_terminal_stays_compact():
    shown = render(make(make_text(9, maps=TABLE_ROWS + 2)), color_system=None)
    assert f"layer {TABLE_ROWS - 1} " in shown and f"layer {TABLE_ROWS} " not in shown
    assert f"{TABLE_ROWS} of {TABLE_ROWS + 2} rows" in shown


@pytest.mark.parametrize(
    ("text", "coloured"),
    [
        (make_text(12, sink=True), True),
        (make_text(12, maps=2), True),
        (make_text(30, cells=4), True),
        (make_text(401), False),
    ],
)
def test_terminal_colours_what_the_last_query_takes(text, coloured):
    shown = render(make(text), force_terminal=True, color_system="256", no_color=False)
    assert ("48;5" in shown) == coloured and ("its 5 strongest keys" in " ".join(shown.split())) == coloured
    assert ("mean of |weight| over 2 maps" in shown) == (len(text.maps) == 2)


def test_the_mean_of_several_maps_is_of_absolute_values():
    text = make_text(12, maps=3, sink=True)
    mean = mean_map(text)
    np.testing.assert_allclose(mean.values, sum(np.abs(each.values) for each in text.maps) / 3, rtol=1e-6)
    np.testing.assert_allclose(mean.sink, sum(np.abs(each.sink) for each in text.maps) / 3, rtol=1e-6)
    assert mean_map(make_text(12)) is None
    parts = [*make_text(12, maps=2).maps, make_map(12, text.queries, None, part="kept")]
    with_parts = AttendedText(**{**vars(text), "maps": tuple(parts)})
    np.testing.assert_allclose(mean_map(with_parts).values, sum(np.abs(each.values) for each in parts[:2]) / 2)


def test_a_row_on_its_own_scale_ends_at_its_percentile():
    large = make_text(300, sink=True)
    limits = row_limits(large.maps[0], large)
    for row in (0, 5, 250, 299):
        own = np.abs(np.append(large.maps[0].values[row, : row + 1], large.maps[0].sink[row]))
        assert limits[row] == (own.max() if len(own) < 200 else np.sort(own)[-2]) or len(own) > 201
        assert np.mean(own <= limits[row]) >= 0.995


def test_terminal_shows_hostile_tokens_harmlessly():
    result = make(make_text(tokens=("<s>", *HOSTILE)), model="\x1b[31m")
    for options in ({"color_system": None}, {"force_terminal": True, "color_system": "truecolor", "no_color": False}):
        shown = render(result, width=110, **options)
        assert "\x1b[31m" not in shown and "\u202e" not in shown and "of ␛[31m: the last token" in shown
    assert "[bold]no" in shown and "⟨202E⟩evil" in shown  # the coloured text has every token
    assert "96–99 " in render(make(make_text(100, cells=8)), color_system=None)


def test_results_without_texts_maps_or_queries_still_show(tmp_path):
    bare = AttendedText(**{**vars(make_text(4)), "maps": ()})
    for result in (make(), make(bare), make(make_text(4, rows=[]))):
        drawn(result)
        assert "Implicit attention" in render(result, width=110, color_system=None)
        assert Result.load(result.save(tmp_path, "attention")["json"]) == result


def test_views_know_their_limits():
    assert (figure.MAPS_PER_FIGURE, figure.TEXTS_PER_FIGURE, triangles.MAX_NAMED_IN_SMALL) == (48, 4, 12)
    assert token_maps.MAX_PAGE_WEIGHTS == 8_000_000
