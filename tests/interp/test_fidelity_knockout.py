"""Fidelity's correlation with the effects of knocking tokens out."""

import numpy as np
import pytest
import torch
from examples import random_example
from loud import loud
import ssmscope
from ssmscope.core.attention_layers import attention_numbers
from ssmscope.core.cuts import cut_attention, cut_edges
from ssmscope.data.text import text_data
from ssmscope.interp.explain.scored_text import Scores
from ssmscope.interp.fidelity import fidelity_auc
from ssmscope.interp.fidelity.measure import knockout_effects
from ssmscope.interp.fidelity.measures import MEASURES
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification

demo = pytest.fixture(scope="module")(lambda: ssmscope.load("demo/sst2-mamba2"))


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
        alone = float(
            plain - model.run(batch, edits=cut_attention([at], later, layers=numbers[1:])).logits.double()[0, 0]
        )
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
    assert found.measures == (*MEASURES, "knockout") and found.estimate("exact", "knockout").value == pytest.approx(1)
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
