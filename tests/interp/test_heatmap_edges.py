"""Heatmaps of texts at the ends of their ranges: tokens judged, merged, followed, compared and refused."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bags import tokenizer
from examples import random_example
from loud import loud
from refusals import refuses
from ssmscope.core.model import Model
from ssmscope.data.text import text_data
from ssmscope.errors import InputError
from ssmscope.interp.attention.measure import absolute_map
from ssmscope.interp.heatmap import measure, selection_heatmap
from ssmscope.interp.heatmap.measure import LayerScores, TokenAverages, through_layers

IDS = [[5, 17, 3, 9, 22, 1, 4, 60, 61, 62, 5], [7, 8, 9, 1]]


@pytest.fixture(scope="module")
def models():
    return {name: Model(loud(random_example(name)), name=name) for name in ("gfssm", "rwkv-deeper", "bamba", "mamba2")}


@pytest.mark.parametrize("name", ["gfssm", "rwkv-deeper"])
def test_memory_is_followed_through_all_layers_below(models, name, monkeypatch):
    """Row by row, from the layer below to the first; what comes of a state before the text is dropped."""
    trace = models[name].trace(ids=IDS)
    shares = np.nan_to_num(trace.survival().double().numpy())
    monkeypatch.setattr(measure, "MAX_THROUGH_TOKENS", 11)
    found = through_layers(trace, shares)
    for row, ids in enumerate(IDS):
        size = len(ids)
        for layer in range(len(shares)):
            p = shares[layer, row, :size]
            for below in range(layer - 1, -1, -1):
                weights, sink, _ = absolute_map(trace.linearized[below].of_text(row, size), "block")
                total = (weights.sum(1) + sink).double().numpy()
                A = weights.double().numpy() / total[:, None]
                p = np.array([p[s] / 2 + sum(p[t] * A[t, s] for t in range(size)) / 2 for s in range(size)])
            np.testing.assert_allclose(found[layer, row, :size], p / p.sum(), rtol=1e-4, atol=1e-7)
    shares[0, 1] = 0.0
    assert not through_layers(trace, shares)[0, 1].any()  # nothing is left of nothing
    monkeypatch.setattr(measure, "MAX_THROUGH_TOKENS", 10)
    refuses("text 0 has 11 tokens; through follows memory in texts of up to 10$", through_layers, trace, shares)


def test_selectivity_is_of_real_tokens_and_nil_where_nothing_is_written(monkeypatch):
    written = torch.tensor([[[0.1, 0.0], [0.3, 0.0], [0.8, 0.0]], [[0.2, 0.5], [0.4, 0.5], [9.0, 9.0]]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    monkeypatch.setattr(measure.ops, "write", lambda r, per_head: written[..., [r.head]])
    monkeypatch.setattr(measure.GateVariation, "visit", lambda *_: None)
    recurrences = [SimpleNamespace(head=head, joins=joins) for head, joins in ((0, False), (0, True), (1, False))]
    layer: Any = SimpleNamespace(recurrences=recurrences, u=torch.zeros(2, 3, 1), reach=3)
    layer.survival = lambda at, readable=False, per_head=False: 2 * written if per_head else written[..., 0]
    for score, expected in (("write", written), ("retention", 1 - written), ("survival", 2 * written)):
        found = LayerScores(4, mask, score, heads=True)
        found.visit(2, [0, 1], layer)
        np.testing.assert_allclose(found.by_head[2], expected)
        a, b = written[0, :, 0].numpy(), written[1, :2, 0].numpy()
        np.testing.assert_allclose(found.selectivity[2], [[a.std() / a.mean(), 0], [b.std() / b.mean(), 0]], rtol=1e-6)
        assert found.reach == 3 and list(found.by_head) == [2]
    assert np.isnan(found.survival[[0, 1, 3]]).all() and found.survival[2, 1, 2] == 9
    assert np.isnan(found.of(None)[2, 1, 2])  # padding
    assert LayerScores(1, mask, "write").reach == 1


@pytest.mark.parametrize(("score", "at"), [("survival", None), ("survival", 2), ("retention", None)])
def test_what_is_judged_as_noise_is_what_is_left_or_overwritten_at_ordinary_tokens(models, score, at, monkeypatch):
    model = Model(models["mamba2"].module, tokenizer(("a", "b", "c", "d", "e")), name="m")
    judged = []
    monkeypatch.setattr(measure, "is_selective", lambda quantity: judged.append(quantity) or len(judged) != 2)
    batch = model.encode(["a b c d e"])
    (text,) = selection_heatmap(model, batch, score=score, at=at)
    trace = model.trace(batch)
    values = trace.survival(at=at).numpy() if score == "survival" else 1 - trace.retention.numpy()
    last = 5 if at is None else at + 1
    expected = values[:, 0, :last]
    assert len(judged) == 3
    for found, own in zip(judged, (expected.mean(0), *expected)):
        np.testing.assert_allclose(found, own, rtol=1e-4, atol=1e-6)
    assert text.flat == (False, True, False) and text.standing[0] == ()


def test_merged_words_have_mean_half_lives_and_summed_heads(models):
    batch = models["mamba2"].encode(ids=IDS[:1])
    batch = dataclasses.replace(batch, words=((0, 0, 0, 1, *range(2, 9)),))
    whole = selection_heatmap(models["mamba2"], batch, half_lives=True, heads="all")[0]
    merged = selection_heatmap(models["mamba2"], batch, half_lives=True, heads="all", merge=True)[0]
    np.testing.assert_allclose(merged.half_lives[:, 0], whole.half_lives[:, :3].mean(1))
    np.testing.assert_allclose(merged.half_lives[:, 1:], whole.half_lives[:, 3:])
    np.testing.assert_allclose(merged.heads[:, 0], whole.heads[:, :3].sum(1), rtol=1e-5)
    assert merged.tokens[0] == "5173" and len(merged.tokens) == 9


def test_scales_and_what_else_looks_back(models):
    batch = models["mamba2"].encode(ids=IDS)
    for scale, shared in ((None, True), ("shared", True), ("row", False)):
        assert selection_heatmap(models["mamba2"], batch, scale=scale).shared == shared
    assert not selection_heatmap(models["mamba2"], batch).attends
    hybrid = models["bamba"].encode(ids=IDS)
    assert selection_heatmap(models["bamba"], hybrid).attends
    assert not selection_heatmap(None, models["bamba"].trace(hybrid)).attends
    some = selection_heatmap(models["mamba2"], batch, layers=[1], top=2, at=3)
    assert some.provenance["options"]["layers"] == [1] and (some.at, some.size, some.layers) == (3, 2, (1,))
    named = selection_heatmap(models["mamba2"], batch, layers="mean")
    assert named.provenance["options"]["layers"] == "mean" and not named.by_layer and len(named[0].scores) == 2
    with pytest.raises(InputError, match="there is no token 4 in every text; the shortest has the tokens 0 to 3"):
        selection_heatmap(models["mamba2"], batch, at=4)
    without = Model(random_example("lfm2"), name="convolved")
    refuses("a heatmap", selection_heatmap, without, without.encode(ids=IDS))


def test_a_contrast_is_over_texts_drawn_of_the_data(models, monkeypatch):
    model = Model(models["mamba2"].module, tokenizer(("a", "b", "c", "d", "e")), name="m")
    corpus = text_data("d", "all", ["a b", "c d e", "b b a", "e", "a c"], [0] * 5, ("x", "y"))
    asked = []
    monkeypatch.setattr("ssmscope.data.text.load_text", lambda *given, **options: asked.append(given) or corpus)
    monkeypatch.setattr(measure, "MAX_CORPUS_TEXTS", 3)
    result = selection_heatmap(model, model.encode(["a e c"]), contrast="some")
    drawn = sorted(np.random.default_rng(0).permutation(5)[:3].tolist())
    averages = TokenAverages(model, [corpus.texts[at] for at in drawn], "survival")
    batch = model.encode(["a e c"])
    z = averages.contrast(model.trace(batch).survival().double().numpy(), batch)[:, 0]
    np.testing.assert_allclose(result[0].scores[:, :3], z[:, :3], rtol=1e-3, atol=1e-4)
    assert (result[0].scores[:, 3] == 0).all() and result.contrast == "some" and asked == [("some", None)]
    with pytest.raises(InputError, match="contrast needs the model, to average over texts; give the model first"):
        selection_heatmap(None, model.trace(batch), contrast="some")


def test_the_layer_that_is_damaged_is_named():
    model = Model(random_example("mamba2"))
    trace = model.trace(ids=IDS)
    values = trace.retention.clone()
    values[1, 1, 2] = float("nan")
    broken = dataclasses.replace(trace, retention=values)
    with pytest.raises(InputError, match="the scores of text 1 are not finite at layer 1; the model is damaged"):
        selection_heatmap(None, broken, score="write")
    assert selection_heatmap(None, broken, score="write", layers=[0]).layers == (0,)
