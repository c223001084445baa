"""Attention maps as table, files and terminal text: complete, blank where nothing is, safe and bounded."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from attended import make, make_map, make_text
from seen import luminance

from ssmscope.errors import InputError
from ssmscope.interp.attention import figure, triangles
from ssmscope.interp.attention import result as attention
from ssmscope.interp.attention.maps import AttendedText, AttentionMap, causal, limit, row_limits
from ssmscope.render import token_maps
from ssmscope.render.colours import SIGNED, SIGNED_ON_DARK, STEPS, ink, signed_shades


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


def test_a_row_on_its_own_scale_ends_at_its_percentile():
    large = make_text(300, sink=True)
    limits = row_limits(large.maps[0], large)
    for row in (0, 5, 250, 299):
        own = np.abs(np.append(large.maps[0].values[row, : row + 1], large.maps[0].sink[row]))
        assert limits[row] == (own.max() if len(own) < 200 else np.sort(own)[-2]) or len(own) > 201
        assert np.mean(own <= limits[row]) >= 0.995


def test_views_know_their_limits():
    assert (figure.MAPS_PER_FIGURE, figure.TEXTS_PER_FIGURE, triangles.MAX_NAMED_IN_SMALL) == (48, 4, 12)
    assert token_maps.MAX_PAGE_WEIGHTS == 8_000_000
