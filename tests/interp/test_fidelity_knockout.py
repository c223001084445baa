"""Fidelity's correlation with the effects of knocking tokens out.

Fidelity on data with rationales: plausibility is measured too, the same as alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from bags import bag, by_word, texts
from examples import random_example
from loud import loud

import ssmscope
from ssmscope.core.attention_layers import attention_numbers
from ssmscope.core.cuts import cut_attention, cut_edges
from ssmscope.data.text import text_data
from ssmscope.errors import InputError
from ssmscope.interp.explain.result import Scores
from ssmscope.interp.fidelity import fidelity_auc
from ssmscope.interp.fidelity.measure import knockout_effects
from ssmscope.interp.fidelity.measures import MEASURES
from ssmscope.interp.plausibility import plausibility
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification


@pytest.fixture(scope="module")
def demo():
    return ssmscope.load("demo/sst2-mamba2")


def effects_as_scores(model, goal, layer) -> Scores:
    effects = knockout_effects(model, goal.batch, [ids[0] for ids in goal.targets], layers=[layer])
    scores = torch.zeros(goal.batch.mask.shape)
    for row, (words, own) in enumerate(zip(goal.batch.words, effects)):
        scores[row, [at for at, word in enumerate(words) if word is not None]] = torch.from_numpy(own[0]).float()
    return Scores(scores)


def test_every_effect_is_a_run_of_its_own(demo):
    model = demo
    batch = model.encode(["A gripping, moving film.", "Dull."])
    probabilities = model.logits(batch).double().softmax(-1)
    targets = probabilities.argmax(-1).tolist()
    effects = knockout_effects(model, batch, targets, layers=[None, 1])
    for text, target in enumerate(targets):
        one = batch.rows([text])
        own = [at for at, word in enumerate(one.words[0]) if word is not None]
        assert effects[text].shape == (2, len(own))
        for layers, found in zip((None, [1]), effects[text]):
            for at, effect in zip(own, found):
                cut = cut_edges([at], range(at + 1, len(one.words[0])), level="block", layers=layers)
                left = model.run(one, edits=cut).logits.double().softmax(-1)[0, target]
                assert effect == pytest.approx(float(probabilities[text, target] - left), abs=1e-6)
    assert (np.abs(effects[0]).max(1) > 1e-4).all() and not np.allclose(*effects[0], atol=1e-4)


def test_of_a_hybrid_attention_is_cut_too():
    hybrid = random_example("bamba")
    config = SSMClassifierConfig(hybrid.config, num_labels=2)
    model = ssmscope.Model(loud(SSMForSequenceClassification(config)))
    batch = model.encode(ids=[[5, 17, 3, 9, 22]])
    plain = model.logits(batch).double()[0, 0]
    numbers = [None, *attention_numbers(model.module)]
    effects, attended, *_ = knockout_effects(model, batch, [0], value="logit", layers=numbers)[0]
    for at, effect in enumerate(effects):
        later = range(at + 1, 5)
        alone = float(plain - model.run(batch, edits=cut_attention([at], later, layers=[0])).logits.double()[0, 0])
        assert attended[at] == pytest.approx(alone, rel=1e-3, abs=1e-5)
        cuts = [cut_edges([at], later, level="block"), cut_attention([at], later)]
        found = [float(plain - model.run(batch, edits=own).logits.double()[0, 0]) for own in (cuts, cuts[:1])]
        assert effect == pytest.approx(found[0], rel=1e-3, abs=1e-5)
        assert at == 4 or effect != pytest.approx(found[1], rel=1e-3)


def test_effects_as_scores_correlate_perfectly(demo):
    model = demo

    def exact(goal) -> Scores:
        return effects_as_scores(model, goal, None)

    def opposite(goal) -> Scores:
        return Scores(-exact(goal).scores)

    data = text_data("d", "all", ["A gripping, moving film.", "Dull and far too long."], [1, 0], model.labels)
    found = fidelity_auc(model, data, methods={"exact": exact, "opposite": opposite}, knockout=True, steps=4)
    assert found.measures == (*MEASURES, "knockout")
    assert found.estimate("exact", "knockout").value == pytest.approx(1)
    assert found.estimate("opposite", "knockout").value == pytest.approx(-1)
    assert abs(found.estimate("random", "knockout").value) < 0.5
    assert "ρ knockout ↑" in found.table() and "ρ knockout" in found.to_html()
    without = fidelity_auc(model, data, methods={"exact": exact, "opposite": opposite}, steps=4)
    assert without.measures == tuple(MEASURES)
    assert np.array_equal(without.values, found.values[..., : len(MEASURES)])


def test_layer_by_layer(demo):
    """Each column is of the effects in its layer, and stands in a table of its own."""

    def second(goal) -> Scores:
        return effects_as_scores(demo, goal, 1)

    data = text_data("d", "all", ["A gripping, moving film.", "Dull and far too long."], [1, 0], demo.labels)
    found = fidelity_auc(demo, data, methods={"second": second}, knockout_layers=True, steps=4)
    assert found.measures == (*MEASURES, "knockout-0", "knockout-1")
    assert found.estimate("second", "knockout-1").value == pytest.approx(1)
    assert found.estimate("second", "knockout-0").value < 0.99
    assert "in one layer alone" in str(found) and "layer 1" in found.to_html()
    assert "knockout" not in str(type(found).compare([found], [["demo"]]))


WORDS = ("a", "b", "c", "d", "e", "f", "g", "h", "i", "j")


def test_plausibility_stands_beside():
    weights = dict(zip(WORDS, np.linspace(1, 0.1, 10)))
    marked = [((0, 1),), None, ((2, 3), (4, 5))]
    data = texts("a b c d", "b c d", "j a b i", rationales=marked)
    found = fidelity_auc(
        bag(weights), data, methods={"own": by_word(weights), "last": by_word({w: -v for w, v in weights.items()})}
    )
    assert found.measures == (*MEASURES, "token_f1", "iou_f1", "auprc") and found.marked == 0.375
    # 37.5 % of 4 tokens are 1.5, rounded to 2: a, b of the first text, and what is marked of the third
    assert found.estimate("own", "token_f1").value == pytest.approx((2 / 3 + 1) / 2)
    assert found.estimate("own", "auprc").value == 1 and found.best("auprc") == ("own",)
    assert found.estimate("last", "auprc").value < 0.6
    assert np.isnan(found.values[:, 1, 5:]).all() and np.isfinite(found.values[:, 1, :5]).all()
    assert "1 of 3 texts have no rationale; plausibility leaves them out" in found.notes
    assert found.rankings.shape == (20, 8) and np.isfinite(found.rankings).all()
    frame = found.to_frame().set_index(["method", "measure"])["texts"]
    assert frame["own", "auprc"] == 2 and frame["own", "delta"] == 3
    assert "token F1" in str(found) and found.figure() is not None


def test_plausibility_alone_is_the_same():
    weights = dict(zip(WORDS, np.linspace(1, 0.1, 10)))
    data = texts("a b c d", "b c d", "j a b i", rationales=[((0, 1),), None, ((2, 3), (4, 5))])
    methods = {"own": by_word(weights), "last": by_word({w: -v for w, v in weights.items()})}
    beside = fidelity_auc(bag(weights), data, methods=methods)
    found = plausibility(bag(weights), data, methods=methods)
    assert found.methods == ("own", "last") and found.texts == (0, 2) and found.left_out == 1
    assert found.values == pytest.approx(beside.values[:, [0, 2], len(MEASURES) :])
    assert found.share == beside.marked and found.provenance["data"] == beside.provenance["data"]
    for top, size in ((2, 2), (2.0, 2), (0.5, 0.5)):
        assert plausibility(bag(weights), data, methods=methods, top=top).top == size
    assert plausibility(bag(weights), data, methods=methods, batch_size=1).values == pytest.approx(found.values)
    with pytest.raises(InputError, match="no text of toy .test. has a rationale"):
        plausibility(bag(weights), texts("a b c d"), methods=methods)
    with pytest.raises(InputError, match="top is 1.5; allowed is a whole number of tokens"):
        plausibility(bag(weights), data, methods=methods, top=1.5)


def test_long_texts_are_left_out_of_plausibility():
    weights = dict(zip(WORDS, np.linspace(1, 0.1, 10)))
    data = texts("a b c", "b a", "j a b i c", rationales=[((0, 1),), ((2, 3),), ((0, 1),)])
    model, method = bag(weights), by_word(weights)

    def of(**options):
        return plausibility(model, data, methods={"own": method}, **options)

    # A special token follows each text.
    assert [of(max_tokens=most).texts for most in (3, 4, 5, 6)] == [(1,), (0, 1), (0, 1), (0, 1, 2)]
    assert [of(max_tokens=most).left_out for most in (3, 6)] == [2, 0]
    with pytest.raises(InputError, match="name each once"):
        plausibility(model, data, methods=["gradxinput", "gradxinput"])
    with pytest.raises(InputError, match=r"toy \(test\) has no example"):
        plausibility(model, replace(data, texts=(), labels=(), rationales=()), methods={"own": method})
    with pytest.raises(InputError, match="a column 'rationale' or an ERASER folder, and texts"):
        of(max_tokens=2)
    found = of(limit=2, seed=3, top=1)
    assert found.provenance["data"]["examples"] == 2 and found.provenance["options"]["top"] == 1
    assert found.provenance["seed"] == 3 and found.provenance["model"] == "bag" and found.top == 1
    for top, size in ((1.0, 1), (3.0, 3), (0.5, 0.5)):
        result = of(top=top)
        given = result.provenance["options"]["top"]
        assert (result.top, given) == (size, size) and type(result.top) is type(given) is type(size)
    assert of().values[0, :, 2].tolist() == pytest.approx([1, 1, 0.2])  # j is the lowest of five
