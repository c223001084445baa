"""Implicit attention at the ends of its ranges: lengths, cells, rows, spans, heads, states before a text, refusals.

Attention maps as table, files and terminal text: complete, blank where nothing is, safe and bounded.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from attended import make, make_map, make_text
from examples import random_example
from faithful import reader
from loud import loud
from seen import luminance

import ssmscope
from ssmscope.core.attention_layers import attention_numbers
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.attention import attention_gradient, figure, implicit_attention, measure, triangles
from ssmscope.interp.attention import result as attention
from ssmscope.interp.attention.maps import AttendedText, AttentionMap, causal, limit, row_limits
from ssmscope.interp.attention.measure import absolute_map, head_names, mean_weights, pooled, split_layers
from ssmscope.interp.methods.gradients import output_gradients
from ssmscope.interp.objective import objective
from ssmscope.ops.pooled import edges
from ssmscope.render import token_maps
from ssmscope.render.colours import SIGNED, SIGNED_ON_DARK, STEPS, ink, signed_shades

IDS = [[5, 17, 3, 9, 22, 1, 4, 60, 61, 62, 5], [7, 8, 9, 1, 2, 3, 30]]


@pytest.fixture(scope="module")
def models():
    names = ("mamba2", "gfssm", "bamba", "vim")
    return {name: Model(loud(random_example(name)), name=name) for name in names}


def only(model, **options):
    """The only map of a text of 11 tokens."""
    (map_,) = implicit_attention(model, model.encode(ids=IDS[:1]), layers=[0], **options)[0].maps
    return map_


def test_texts_are_pooled_from_one_token_beyond_the_limit(models, monkeypatch):
    batch = models["mamba2"].encode(ids=IDS)
    monkeypatch.setattr(measure, "DEFAULT_CELLS", 3)
    for most, cells in ((11, [11, 7]), (7, [3, 7]), (6, [3, 3])):
        monkeypatch.setattr(measure, "MAX_WHOLE_TOKENS", most)
        found = implicit_attention(models["mamba2"], batch, layers=[0])
        assert [len(text.maps[0].values) for text in found] == cells
        assert [text.edges is None for text in found] == [count > 3 for count in cells]
        for pool, size in ((2, [2, 2]), (0, [11, 7])):
            given = implicit_attention(models["mamba2"], batch, layers=[0], pool=pool)
            assert [len(text.maps[0].values) for text in given] == size
        rows = implicit_attention(models["mamba2"], batch, layers=[0], rows=[2])
        assert all(text.edges is None and text.maps[0].values.shape == (1, len(text)) for text in rows)


@pytest.mark.parametrize("pool", [0, 1, 5, 10, 11, 12, 40])
def test_cells_are_means_over_their_pairs_and_fewer_than_tokens(models, pool):
    (text,) = implicit_attention(models["gfssm"], models["gfssm"].encode(ids=IDS[:1]), layers=[1], pool=pool)
    whole = implicit_attention(models["gfssm"], models["gfssm"].encode(ids=IDS[:1]), layers=[1])[0].maps[0]
    (map_,) = text.maps
    if not 0 < pool < 11:
        assert text.edges is None and text.queries.tolist() == list(range(11))
        np.testing.assert_allclose(map_.values, whole.values, rtol=1e-5)
        return
    edge = edges(11, pool).tolist()
    assert text.edges.tolist() == edge and text.queries.tolist() == [last - 1 for last in edge[1:]]
    for q in range(pool):
        pairs = range(edge[q], edge[q + 1])
        assert map_.sink[q] == pytest.approx(whole.sink[list(pairs)].mean(), rel=1e-4)
        for k in range(pool):
            own = [whole.values[t, s] for t in pairs for s in range(edge[k], edge[k + 1]) if s <= t]
            assert map_.values[q, k] == pytest.approx(np.mean(own) if own else 0.0, rel=1e-3, abs=1e-7)


def test_a_whole_map_is_pooled_over_pairs_that_look_back():
    matrix = torch.tril(torch.rand(7, 7, generator=torch.Generator().manual_seed(0)))
    edge = torch.tensor([0, 1, 4, 5, 7])
    found = pooled(matrix, edge)
    for q, (first, last) in enumerate(zip(edge[:-1], edge[1:])):
        for k, (begin, end) in enumerate(zip(edge[:-1], edge[1:])):
            own = [float(matrix[t, s]) for t in range(first, last) for s in range(begin, end) if s <= t]
            assert float(found[q, k]) == pytest.approx(np.mean(own) if own else 0.0)


@pytest.mark.parametrize(
    "options", [{"pool": 4}, {"rows": [-11, 0, 10]}, {"rows": "last"}, {"heads": "abs", "pool": 4}]
)
def test_a_rollout_is_shown_as_other_maps_are(models, options):
    whole = only(models["gfssm"], rollout=True, heads=options.get("heads", "mean"))
    found = only(models["gfssm"], rollout=True, **options)
    if "pool" in options:
        edge = edges(11, 4)
        expected = pooled(torch.from_numpy(whole.values), edge)
        sink = [whole.sink[first:last].mean() for first, last in zip(edge[:-1], edge[1:])]
    else:
        rows = [10] if options["rows"] == "last" else [0, 0, 10]
        expected, sink = whole.values[rows], whole.sink[rows]
    np.testing.assert_allclose(found.values, expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found.sink, sink, rtol=1e-4)
    assert found.layer == "rollout" and found.head == options.get("heads", "mean")


def test_a_rollout_needs_whole_maps_and_its_share_of_the_residual_stream(models, monkeypatch):
    monkeypatch.setattr(measure, "MAX_ROLLOUT_TOKENS", 11)
    with_all, with_none = (
        only(models["gfssm"], rollout=True, residual=1),
        only(models["gfssm"], rollout=True, residual=0),
    )
    assert (with_all.values == np.eye(11)).all() and not with_all.sink.any()
    trace = models["gfssm"].trace(ids=IDS[:1])
    weights, sink, has_sink = absolute_map(trace.linearized[0], "block", signed=True)
    total = weights.sum(-1) + sink
    np.testing.assert_allclose(with_none.values, weights / total[:, None], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(with_none.sink, sink / total, rtol=1e-4)
    assert has_sink and not absolute_map(models["mamba2"].trace(ids=IDS[:1]).linearized[0], "ssm")[2]
    monkeypatch.setattr(measure, "MAX_ROLLOUT_TOKENS", 10)
    with pytest.raises(InputError, match="text 0 has 11 tokens: a rollout needs whole maps, of at most 10 tokens"):
        only(models["gfssm"], rollout=True)


def test_names_of_heads_and_groups_of_channels():
    assert head_names(5, "mean") == ["mean"] and head_names(5, "abs") == ["abs"]
    assert head_names(64, "all") == [str(head) for head in range(64)]
    assert head_names(65, "all") == [f"{5 * g}–{5 * g + 4}" for g in range(13)]
    assert head_names(96, "all")[:2] == ["0–5", "6–11"] and len(head_names(96, "all")) == 16
    assert head_names(67, "all") == ["0–66"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"rows": [11]}, "text 0 has no row 11; allowed are positions below 11"),
        ({"rows": [3, -12]}, "text 0 has no row -12"),
        ({"span": "3:x"}, "text 0 has no '3:x'; give a piece of it, or token positions as 3:7"),
        ({"span": "x:3"}, "text 0 has no 'x:3'"),
        ({"span": "3:3"}, "the span 3:3 is not within the 11 tokens of text 0"),
        ({"span": "8:12"}, "the span 8:12 is not within"),
        ({"heads": "abs", "pool": 4}, "the mean of absolute values cannot be pooled"),
        ({"rows": [1], "pool": 4}, "pool=… averages whole maps: give it without rows=…"),
        ({"target": 3}, "target=… is the class or token of gradient=…"),
        ({"parts": True, "rollout": True}, "parts=True and rollout=True cannot be combined"),
        *(
            ({"gradient": True, name: value}, f"gradient=True cannot be combined with {said}$")
            for name, value, said in (
                ("rollout", True, "rollout=True"),
                ("parts", True, "parts=True"),
                ("level", "ssm", "level='ssm'"),
                ("skip", False, "skip=False"),
            )
        ),
        ({"gradient": True, "heads": "abs"}, "heads='abs' has no sum over channels"),
    ],
)
def test_refused(models, options, line):
    with pytest.raises(InputError, match=line):
        only(models["mamba2"], **options)


def test_what_is_allowed_at_the_ends(models):
    model = models["mamba2"]
    assert 0 < only(model, span="9:10").readouts.outside < 1  # of the last token, the only one after it
    assert np.isnan(only(model, span="0:11").readouts.outside)
    assert only(model, rows=[2], pool=0).values.shape == (1, 11)
    assert only(model, heads="abs", pool=0).values.shape == (11, 11)


def test_options_are_recorded(models):
    model, batch = models["gfssm"], models["gfssm"].encode(ids=IDS)

    def options(**given):
        return implicit_attention(model, batch, **given).provenance["options"]

    common = {"layers": "all", "heads": "mean", "rows": "all", "pool": None, "span": None, "top": 4}
    own = {"level": "block", "skip": True, "parts": False, "rollout": False}
    assert options() == {**common, **own}
    assert options(rollout=True, residual=0.25) == {**common, **own, "rollout": True, "residual": 0.25}
    assert options(gradient=True, target="7", rows=(0, 1)) == {**common, "rows": [0, 1], "target": ["7", "7"]}
    found = implicit_attention(model, batch, gradient=True)
    assert found.level == "gradient" and found.heads == "mean" and found.top == 4


def test_models_that_look_ahead_have_no_readouts(models):
    (text,) = implicit_attention(models["vim"], models["vim"].encode(ids=IDS[1:]))
    assert text.bidirectional and all(np.isnan(list(vars(map_.readouts).values())).all() for map_ in text.maps)
    assert len(vars(text.maps[0].readouts)) == 4


def test_a_damaged_layer_is_named(models):
    trace = models["mamba2"].trace(ids=IDS)
    shown = measure.ShownText(trace, 1, measure.Asked("ssm", "mean", "all", None, True, 0.5, None, 4))
    shown.add("0", "", "mean", torch.eye(7))
    with pytest.raises(InputError, match="the attention of text 1 is not finite at layer 5: the model is damaged"):
        shown.add("5", "", "mean", torch.eye(7).index_fill(0, torch.tensor(2), float("nan")))


def test_a_state_before_the_text_has_its_part_of_a_gradient(models):
    model = models["gfssm"]
    batch = model.encode(ids=IDS[:1])
    (map_,) = attention_gradient(model, batch, layers=[1], target=3)[0].maps
    heads = attention_gradient(model, batch, layers=[1], target=3, heads="all")[0].maps
    goal = objective(model, batch, target=3)
    ((_, gradient),) = output_gradients(goal, goal.embeddings(), [0], [model.mixers[1]])
    weighed = model.trace(batch).linearized[1].contributions(gradient)
    count = weighed.channels[0] * weighed.channels[1]
    np.testing.assert_allclose(map_.sink, count * weighed.sink("block")[0, 0], rtol=1e-4, atol=1e-9)
    for name in ("sink", "values"):
        parts = [getattr(head, name) for head in heads]
        np.testing.assert_allclose(np.sum(parts, axis=0), getattr(map_, name), rtol=1e-3, atol=1e-8)
    cells = attention_gradient(model, batch, layers=[1], target=3, pool=4)[0].maps[0]
    edge = edges(11, 4)
    np.testing.assert_allclose(cells.values, pooled(torch.from_numpy(map_.values), edge), rtol=1e-3, atol=1e-8)


def test_targets_of_a_gradient_by_name_or_number():
    model = reader(labels=3)
    model.module.config.id2label = {0: "2", 1: "x", 2: "0"}
    batch = model.encode(["a b c", "d"])
    for target, names in (("2", ["2", "2"]), (2, ["0", "0"]), ("1", ["x", "x"]), ("x", ["x", "x"])):
        assert attention_gradient(model, batch, target=target).provenance["options"]["target"] == names
    books = ssmscope.load("demo/books-mamba2")
    words = books.encode(["He was a"])
    assert attention_gradient(books, words, target="7", layers=[0]).provenance["options"]["target"] == ["7"]
    with pytest.raises(InputError, match="the target 'good' has several tokens; give one token's id"):
        attention_gradient(books, words, target="good")


def test_large_maps_of_softmax_attention_are_left_out_of_gradients_for_all_texts_together(models, monkeypatch):
    model, batch = models["bamba"], models["bamba"].encode(ids=IDS)
    (number,) = attention_numbers(model.module)
    for most, there in ((2 * 2 * 11**2, True), (2 * 2 * 11**2 - 1, False)):
        monkeypatch.setattr(measure, "MAX_MAP_WEIGHTS", most)
        for text in attention_gradient(model, batch, target=3):
            assert (f"{number} attention" in [map_.layer for map_ in text.maps]) == there
    alone = attention_gradient(model, batch, target=3, layers=[0])
    assert all([map_.layer for map_ in text.maps] == ["0"] for text in alone)


def test_layers_are_split_into_both_kinds():
    assert split_layers("all", [0, 2], [1, 1, 3]) == ("all", (1, 3)) and split_layers([1, 0], [0, 1], []) == (
        (1, 0),
        (),
    )
    assert split_layers([3, 2, 1], [0, 2], [1, 3, 2]) == ((2,), (3, 2, 1))
    with pytest.raises(InputError, match="there is no layer 4"):
        split_layers([4], [0, 2], [1])


def test_weights_of_attention_layers_are_means_over_heads(models):
    model, batch = models["bamba"], models["bamba"].encode(ids=IDS)
    (number,) = attention_numbers(model.module)
    found = mean_weights(model, batch, 1, [number])
    heads = [m.values for m in implicit_attention(model, batch, layers=[number], heads="all")[1].maps]
    np.testing.assert_allclose(found[number], np.mean(heads, axis=0), rtol=1e-4, atol=1e-7)
    assert mean_weights(model, batch, 1, [0]) == {}


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
