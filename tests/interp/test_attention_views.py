"""Attention maps as table, terminal text, figure and page: complete, blank where nothing is, safe and bounded."""

from __future__ import annotations

import base64
import itertools
import json
import math
import re

import numpy as np
import pandas as pd
import pytest
from drawn import drawn, labels, outside, overlapping
from exhaustive import few
from matplotlib.colors import to_hex
from seen import luminance, render

from ssmscope.errors import InputError
from ssmscope.interp.attention import page as attention_page
from ssmscope.interp.attention import result as attention
from ssmscope.interp.attention import triangles, views
from ssmscope.interp.attention.maps import averaged, causal, limit, row_limits, strongest, telling, title
from ssmscope.interp.attention.readouts import read
from ssmscope.interp.attention.result import KEYS, AttendedText, AttentionMap, ImplicitAttention
from ssmscope.interp.attention.triangles import strongest_of_blocks
from ssmscope.results import TABLE_ROWS, Result
from ssmscope.show.numbers import number
from ssmscope.show.signed import SIGNED, SIGNED_ON_DARK, STEPS, levels, shades
from ssmscope.show.token_figure import EMPTY, FINE
from ssmscope.show.tokens import ink, ramp

SENTENCE = (
    "I went into this film expecting very little , and for the first twenty minutes that is what I got : "
    "a slow , talky drama about a lighthouse keeper and his estranged daughter . Then something happens ."
).split()
HOSTILE = (
    *(
        "<script>alert('x')</script>",
        "</script>",
        "<!--",
        ' "q" $x$',
        "\n",
        "\t",
        "\x1b[31m",
        " 電影",
        "😀",
        "\u202eevil",
    ),
    *("[bold]no", "&amp;", "antidisestablishmentarianism-and-more"),
)


def words(length):
    taken = itertools.islice(itertools.cycle(SENTENCE), length - 1)
    return ("<s>", *(" " + word if word[0].isalnum() else word for word in taken))[:length]


def make_map(text_length, queries, edges, *, seed=0, sink=False, span=None, **names):
    """A random map that falls off with distance, over the tokens or over the cells between the edges."""
    random = np.random.default_rng(seed)
    keys = np.arange(text_length) if edges is None else edges[:-1]
    lag = queries[:, None] - keys[None]
    noise = random.normal(size=lag.shape) * 0.95 ** np.maximum(lag, 0) * 0.01
    values = np.where(lag >= 0, noise, 0).astype(np.float32)
    state = (random.normal(size=len(queries)) * 0.01).astype(np.float32) if sink else None
    names = {"layer": "0", "part": "", "head": "mean", **names}
    return AttentionMap(**names, values=values, sink=state, readouts=read(values, state, queries, edges, span, 4))


def make_text(length=12, *, tokens=None, maps=1, rows=None, cells=None, span=None, sink=False, pixels=None, **names):
    tokens = words(length) if tokens is None else tuple(tokens)
    length = len(tokens)
    edges = None if cells is None else np.unique(np.append(np.arange(0, length, cells), length))
    queries = np.arange(length) if rows is None else np.array(rows, dtype=np.int64)
    if edges is not None:
        queries = edges[1:] - 1
    special = (None, *range(length - 1)) if pixels is None else (*range(length - 1), None)
    made = [
        make_map(length, queries, edges, seed=seed, sink=sink, span=span, **{"layer": str(seed), **names})
        for seed in range(maps)
    ]
    return AttendedText(tokens, special, queries, edges, span, tuple(made), "positive", 0.75, pixels)


def make(*texts, heads="mean", model="demo/test", level="block"):
    return ImplicitAttention(
        provenance={"model": model, "options": {}}, texts=tuple(texts), level=level, heads=heads, top=4
    )


@pytest.fixture(scope="module")
def image():
    return np.random.default_rng(0).random((4, 5, 3)).astype(np.float32)


# The table


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("options", [{}, {"rows": [3, 11]}, {"cells": 5}])
def test_the_frame_is_the_strongest_keys_of_every_query(monkeypatch, sink, options):
    monkeypatch.setattr(attention, "KEYS", 4)
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
    frame = make(make_text(KEYS + 10)).to_frame()
    counts = frame.groupby("query").size()
    assert counts.tolist() == [min(query + 1, KEYS) for query in range(KEYS + 10)]
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


def test_files_round_trip(tmp_path, image):
    result = make(
        make_text(tokens=("<s>", *HOSTILE), sink=True, span=(2, 4)),
        make_text(30, cells=7),
        make_text(21, rows=[20], pixels=image),
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
    assert make(text).headline == "Implicit attention of demo/test: block level, layers 0–2, 5, rollout"
    assert make(make_text(4, head="0–95", part="conv")).headline.endswith("block level, layer 0")
    by_gradient = make(make_text(4), level="gradient")
    assert by_gradient.headline == "Implicit attention of demo/test: attention × gradient, layer 0"
    assert "Implicit attention of demo/test: attention × gradient" in labels(by_gradient.figure())
    assert (
        title(make_map(4, np.arange(4), None, layer="3", head="0–95", part="conv")) == "layer 3 · conv · channels 0–95"
    )
    assert title(make_map(4, np.arange(4), None, layer="3", head="5")) == "layer 3 · head 5"


# Colours and their limits


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


def test_shades_are_symmetric_around_zero():
    weights = np.array([-3.0, -1, -0.5, 0, 0.5, 1, 3])
    assert levels(weights, 1.0).tolist() == [-STEPS, -STEPS, -STEPS // 2, 0, STEPS // 2, STEPS, STEPS]
    assert not levels(weights, 0.0).any()
    for stops in (SIGNED, SIGNED_ON_DARK):
        colours = shades(stops)
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


# The terminal


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
    mean = averaged(text)
    np.testing.assert_allclose(mean.values, sum(np.abs(each.values) for each in text.maps) / 3, rtol=1e-6)
    np.testing.assert_allclose(mean.sink, sum(np.abs(each.sink) for each in text.maps) / 3, rtol=1e-6)
    assert averaged(make_text(12)) is None
    parts = [*make_text(12, maps=2).maps, make_map(12, text.queries, None, part="kept")]
    with_parts = AttendedText(**{**vars(text), "maps": tuple(parts)})
    np.testing.assert_allclose(averaged(with_parts).values, sum(np.abs(each.values) for each in parts[:2]) / 2)


def test_the_row_that_tells_most():
    values = np.zeros((4, 4), dtype=np.float32)
    values[np.arange(4), np.arange(4)] = 1  # of themselves alone
    values[2, :3] = (0.9, -0.9, 1)
    values[3, :] = (0.1, 0.1, 0.1, 1)
    text = make_text(4)
    only = AttentionMap("0", "", "mean", values, None, text.maps[0].readouts)
    assert telling(only, text) == 2
    assert telling(AttentionMap("0", "", "mean", values * 0, None, only.readouts), text) == 3
    sink = np.array([0, 0, 0, 5], dtype=np.float32)
    assert (
        telling(AttentionMap("0", "", "mean", values * np.array([1, 1, 0, 1])[:, None], sink, only.readouts), text) == 3
    )
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
        assert "\x1b[31m" not in shown and "\u202e" not in shown and "of ␛[31m: block" in shown
    assert "[bold]no" in shown and "⟨202E⟩evil" in shown  # the coloured text has every token
    assert "96–99 " in render(make(make_text(100, cells=8)), color_system=None)


# The figure


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
        *("1 tokens", "61 tokens", "2 maps", "49 maps", "24 long maps", "12 labelled maps", "odd tokens", "cells"),
        *("boxes", "bars", "pictures"),
    ),
)
def test_nothing_overlaps_or_is_cut_off_in_the_figure(layout):
    figure, texts = drawn(make(LAYOUTS[layout](), make_text(3)))
    assert not overlapping(texts) and not outside(figure, texts)
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == ["−limit", "0", "limit"]


def pictures(figure):
    """The arrays that are drawn as maps, the column of the state left out."""
    return [image.get_array() for axes in figure.axes for image in axes.images if image.get_array().shape[1] > 1]


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
        assert (f"±{number(end)}, largest {number(largest)}" in shown) == (text is clipped)
    nothing = make_text(5)
    nothing.maps[0].values[:] = 0
    assert "all weights are 0" in labels(make(nothing).figure())


def test_every_map_has_its_title_and_limits():
    text = make_text(20, maps=13, head="5")
    shown = labels(make(text).figure())
    for map_ in text.maps:
        assert f"layer {map_.layer} · head 5" in shown
        assert any(text.startswith(f"±{number(limit(map_, make_text(20))[0])}") for text in shown)


def test_figures_hold_so_many_maps_and_4_texts_and_say_so(monkeypatch):
    monkeypatch.setattr(views, "MAPS", 8)
    shown = labels(make(make_text(6, maps=10)).figure())
    assert "layer 7" in shown and "layer 8" not in shown and any("2 more maps" in text for text in shown)
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
    strips = [image.get_array()[0] for axes in figure.axes for image in axes.images]
    assert len(strips) == 2
    for row, strip in enumerate(strips):
        query = int(text.queries[row])
        end = row_limits(text.maps[0], text)[row]
        found = shades()
        wanted = [found[level + STEPS] for level in levels(text.maps[0].values[row, : query + 1].astype(float), end)]
        assert [to_hex(colour) for colour in strip[: query + 1]] == wanted
        assert len({to_hex(colour) for colour in strip[query + 1 :]}) <= 1  # what comes after is blank
    shown = labels(figure)
    assert f"state {number(float(text.maps[0].sink[1]))}" in shown and "position" in shown


def test_chosen_queries_of_images_are_pictures(image):
    text = make_text(21, rows=[7, 20], pixels=image)
    figure = make(text).figure()
    first, *rows = [axes for axes in figure.axes if axes.images]
    np.testing.assert_allclose(first.images[0].get_array(), image)
    for axes, row, query in zip(rows, text.maps[0].values, (7, 20)):
        shown = axes.images[0].get_array().reshape(-1, 3)
        end = np.abs(row[: query + 1]).max()
        place = np.rint((row[: query + 1].astype(float) / end + 1) / 2 * (FINE - 1)).astype(int)
        colours = ramp(SIGNED, FINE)
        assert [to_hex(colour) for colour in shown[: query + 1]] == [colours[at] for at in place[:20]]
        assert len({to_hex(colour) for colour in shown[query + 1 :]} - {EMPTY}) == 0
    assert [(box.get_x(), box.get_y()) for box in rows[0].patches] == [(1.5, 0.5)]  # pixel 7 is at row 1, column 2


def test_figure_leaves_no_global_state():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    make(make_text(5)).figure()
    assert plt.get_fignums() == before


def test_results_without_texts_maps_or_queries_still_show(tmp_path):
    bare = AttendedText(**{**vars(make_text(4)), "maps": ()})
    for result in (make(), make(bare), make(make_text(4, rows=[]))):
        drawn(result)
        assert "Implicit attention" in render(result, width=110, color_system=None)
        assert Result.load(result.save(tmp_path, "attention")["json"]) == result


# The page


def data_of(page):
    """What the script of a page reads, as the script reads it: up to the first thing that closes its element."""
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
    assert found["opens"] == telling(text.maps[0], text)
    ends = np.frombuffer(base64.b64decode(packed["ends"]), "<f4")
    np.testing.assert_allclose(ends, row_limits(text.maps[0], text), rtol=1e-6)
    named = np.frombuffer(base64.b64decode(packed["keys"]), "<i4").reshape(len(text.queries), -1)
    exact = np.frombuffer(base64.b64decode(packed["weights"]), "<f4").reshape(named.shape)
    for row in range(len(named)):  # as they are, not in eight bits
        wanted = strongest(text.maps[0], row, text, views.STRONGEST)
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
    mean = averaged(text)
    assert found["opens"] == telling(mean, text) and found["maps"][0]["largest"] == float(np.abs(mean.values).max())
    assert 'type="checkbox" checked' in page


def test_page_keeps_to_its_budget_and_says_what_is_left_out(monkeypatch):
    result = make(make_text(150, maps=5), make_text(150, maps=2))
    rest = len(attention_page.fragment(make(make_text(150), make_text(150))))
    monkeypatch.setattr(attention_page, "BUDGET", rest + 210_000)
    full = attention_page.fragment(result)
    assert len(full.encode()) < rest + 210_000 and "Left out" not in full
    monkeypatch.setattr(attention_page, "BUDGET", len(full) - 60_000)
    page = attention_page.fragment(result)
    assert len(page.encode()) <= len(full) - 60_000
    first, second = (len(text["maps"]) for text in data_of(page)["texts"])
    assert 2 <= first < 6 and first - second <= 1  # in turns
    named = ", ".join(f"layer {layer}" for layer in range(first - 1, 5))
    assert f"Left out here for the size of the page: {named}. The .json file has them." in page
    for option in range(1, first):
        assert f'<option value="{option}">layer {option - 1}</option>' in page


def test_long_texts_are_only_in_the_picture(monkeypatch):
    monkeypatch.setattr(attention_page, "TEXT_TOKENS", 20)
    page = make(make_text(21), make_text(20))._repr_html_()
    assert data_of(page)["texts"][0] is None and data_of(page)["texts"][1]["length"] == 20
    assert "A text of 21 tokens is too long to be written out here" in page
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


def test_images_are_written_as_pixels_in_their_places(image):
    page = make(make_text(21, rows=[7, 20], pixels=image, sink=True))._repr_html_()
    grid = re.findall(r'<div class="grid".*?</div>', page, flags=re.DOTALL)[0]
    assert grid.count("data-i=") == 20 and "repeat(5, 16px)" in grid and 'data-i="20"' in page
    assert page.count("data:image/png") == 2 and 'class="state"' in page  # the image and the figure


def test_the_table_of_readouts_is_there_and_bounded(monkeypatch):
    monkeypatch.setattr(views, "MAPS", 2)  # of the picture
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


def test_views_know_their_limits():
    assert (views.MAPS, views.TEXTS, triangles.LABELLED_TOKENS) == (48, 4, 60)
    assert attention_page.BUDGET == 12_000_000
