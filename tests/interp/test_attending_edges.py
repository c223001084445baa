"""Implicit attention at the ends of its ranges: lengths, cells, rows, spans, heads, states before a text, refusals."""

import numpy as np
import pytest
import torch
from examples import random_example
from loud import loud
from refusals import refuses
from ssmscope.core.attention_layers import attention_numbers
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.attention import implicit_attention, measure
from ssmscope.interp.attention.measure import absolute_map, head_names, mean_weights, pooled, split_layers
from ssmscope.interp.methods.gradients import output_gradients
from ssmscope.interp.objective import objective
from ssmscope.ops.pooled import edges

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


@pytest.mark.parametrize(("options", "line"), [
    ({"rows": [11]}, "text 0 has no row 11; allowed are positions below 11"),
    ({"rows": [3, -12]}, "text 0 has no row -12"),
    ({"span": "3:x"}, "text 0 has no '3:x'; give a piece of it, or token positions as 3:7"),
    ({"span": "x:3"}, "text 0 has no 'x:3'"),
    ({"span": "3:3"}, "the span 3:3 is not within the 11 tokens of text 0"),
    ({"span": "8:12"}, "the span 8:12 is not within"),
    *(
        ({"gradient": True, name: value}, f"gradient=True cannot be combined with {said}$")
        for name, value, said in (
            ("parts", True, "parts=True"),
            ("level", "ssm", "level='ssm'"),
            ("skip", False, "skip=False"),
        )
    ),
])  # fmt: skip
def test_refused(models, options, line):
    refuses(line, only, models["mamba2"], **options)


def test_what_is_allowed_at_the_ends(models):
    model = models["mamba2"]
    assert 0 < only(model, span="9:10").readouts.outside < 1  # of the last token, the only one after it
    assert np.isnan(only(model, span="0:11").readouts.outside)
    assert only(model, rows=[2], pool=0).values.shape == (1, 11)
    assert only(model, heads="abs", pool=0).values.shape == (11, 11)


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
    (map_,) = implicit_attention(model, batch, layers=[1], target=3, gradient=True)[0].maps
    heads = implicit_attention(model, batch, layers=[1], target=3, heads="all", gradient=True)[0].maps
    goal = objective(model, batch, target=3)
    ((_, gradient),) = output_gradients(goal, goal.embeddings(), [0], [model.mixers[1]])
    weighed = model.trace(batch).linearized[1].contributions(gradient)
    count = weighed.channels[0] * weighed.channels[1]
    np.testing.assert_allclose(map_.sink, count * weighed.sink("block")[0, 0], rtol=1e-4, atol=1e-9)
    for name in ("sink", "values"):
        parts = [getattr(head, name) for head in heads]
        np.testing.assert_allclose(np.sum(parts, axis=0), getattr(map_, name), rtol=1e-3, atol=1e-8)
    cells = implicit_attention(model, batch, layers=[1], target=3, pool=4, gradient=True)[0].maps[0]
    edge = edges(11, 4)
    np.testing.assert_allclose(cells.values, pooled(torch.from_numpy(map_.values), edge), rtol=1e-3, atol=1e-8)


def test_large_maps_of_softmax_attention_are_left_out_of_gradients_for_all_texts_together(models, monkeypatch):
    model, batch = models["bamba"], models["bamba"].encode(ids=IDS)
    (number,) = attention_numbers(model.module)
    for most, there in ((2 * 2 * 11**2, True), (2 * 2 * 11**2 - 1, False)):
        monkeypatch.setattr(measure, "MAX_MAP_WEIGHTS", most)
        for text in implicit_attention(model, batch, target=3, gradient=True):
            assert (f"{number} attention" in [map_.layer for map_ in text.maps]) == there
    alone = implicit_attention(model, batch, target=3, layers=[0], gradient=True)
    assert all([map_.layer for map_ in text.maps] == ["0"] for text in alone)


def test_layers_are_split_into_both_kinds():
    assert split_layers("all", [0, 2], [1, 1, 3]) == ("all", (1, 3)) and split_layers([1, 0], [0, 1], []) == (
        (1, 0),
        (),
    )
    assert split_layers([3, 2, 1], [0, 2], [1, 3, 2]) == ((2,), (3, 2, 1))
    refuses("there is no layer 4", split_layers, [4], [0, 2], [1])


def test_weights_of_attention_layers_are_means_over_heads(models):
    model, batch = models["bamba"], models["bamba"].encode(ids=IDS)
    (number,) = attention_numbers(model.module)
    found = mean_weights(model, batch, 1, [number])
    heads = [m.values for m in implicit_attention(model, batch, layers=[number], heads="all")[1].maps]
    np.testing.assert_allclose(found[number], np.mean(heads, axis=0), rtol=1e-4, atol=1e-7)
    assert mean_weights(model, batch, 1, [0]) == {}
