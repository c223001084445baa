"""Influence of every architecture: options and refusals, its table, terminal view, figure and files."""

import numpy as np
import pytest
import torch
from examples import HALVES, TEXTS, random_example
from loud import loud
from refusals import refuses
import ssmscope
from ssmscope.core import batching
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.probes.influence import influence, measure
from ssmscope.probes.influence.result import Influence


def example(name: str) -> Model:
    return Model(loud(random_example(name)), name=name)


model = pytest.fixture(scope="module")(lambda: example("mamba2"))


@pytest.fixture(scope="module")
def found(model) -> Influence:
    return influence(model, model.encode(ids=TEXTS), at="layers", positions="all")


output = pytest.fixture(scope="module")(lambda: influence(example("mamba"), length=24, sequences=3))


class TestEveryModel:
    @pytest.mark.parametrize("name", HALVES[1])
    def test_of_every_architecture(self, name):
        model = example(name)
        result = influence(model, model.encode(ids=TEXTS), at="layers", exact=False, probes=2)
        assert [reach.place for reach in result.reaches] == ["output", *map(str, model.layer_numbers)]
        for reach in result.reaches:
            assert np.isfinite(reach.norm).all() and (reach.norm[:, 0] > 0).all() and reach.decay.defined
            assert reach.pairs.tolist() == [3, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1]
            assert reach.within[-1, 0] == pytest.approx(1) and not reach.exact
        assert np.isfinite(result.similarity.stream).all() and np.isfinite(result.similarity.mixer).all()
        assert result.output.recent(11).value == pytest.approx(1)

    @pytest.mark.parametrize("of", ["hidden", "logits"])
    def test_a_classifier_of_texts(self, of):
        torch.manual_seed(0)
        backbone = example("mamba").config
        classifier = Model(loud(SSMForSequenceClassification(SSMClassifierConfig(backbone, num_labels=2))))
        result = influence(classifier, classifier.encode(ids=TEXTS), of=of)
        assert result.of == of and result.unit == "tokens" and result.noun == "texts"
        assert result.lengths.tolist() == [11, 3, 6]
        if of == "hidden":
            assert influence(classifier, classifier.encode(ids=TEXTS), positions=[0]).output.pairs.tolist() == [3]

    def test_a_classifier_of_pixels(self):
        pixels = ssmscope.load("demo/cifar10-mamba")
        result = influence(pixels, length=20, sequences=2, of="logits", at="layers")
        assert result.unit == "pixels" and result.noun == "random images" and result.one == "an image"
        assert result.lengths.tolist() == [20, 20] and len(result.layers) == pixels.num_layers
        own = pixels.encode(values=np.full((1, 19, 3), 0.5, dtype=np.float32))
        assert influence(pixels, own).noun == "images"

    def test_texts_themselves(self):
        classifier = ssmscope.load("demo/sst2-mamba2")
        texts = ["A gripping, beautifully acted film.", "Dull."]
        again = influence(classifier, classifier.encode(texts))
        result = influence(classifier, texts)
        assert result.lengths.tolist() == again.lengths.tolist() == classifier.encode(texts).lengths
        np.testing.assert_array_equal(result.output.norm, again.output.norm)
        assert influence(classifier, texts[0]).lengths.tolist() == result.lengths[:1].tolist()

    def test_layers_are_measured_in_groups_that_fit(self, model, monkeypatch):
        alone = influence(model, model.encode(ids=TEXTS[1:]), at="layers", positions="all")
        monkeypatch.setattr(batching, "MAX_NUMBERS_KEPT", 1)
        again = influence(model, model.encode(ids=TEXTS[1:]), at="layers", positions="all")
        for a, b in zip(alone.layers, again.layers):
            np.testing.assert_allclose(a.norm, b.norm, rtol=1e-5)


class TestOptions:
    def test_positions(self, model, found):
        batch = model.encode(ids=TEXTS)
        curve = found.distances()
        assert curve.pairs.tolist() == [20, 17, 14, 11, 9, 7, 5, 4, 3, 2, 1]
        some = influence(model, batch, positions=[-1, 1, 1, 2])
        assert some.positions == "chosen" and some.output.pairs.tolist() == [8, 8, 5, 2, 2, 2, 1, 1, 1, 1, 1]
        last = influence(model, batch)
        assert last.output.pairs.tolist() == [3, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1]
        np.testing.assert_allclose(last.output.held, found.output.held)
        np.testing.assert_allclose(last.output.within, some.output.within, rtol=1e-5)

    def test_random_sequences_are_of_the_seed(self, output):
        model = example("mamba")
        again, other = (influence(model, length=24, sequences=3, seed=seed) for seed in (0, 1))
        np.testing.assert_array_equal(again.output.norm, output.output.norm)
        assert (again.output.norm[:, 0] != other.output.norm[:, 0]).any()
        assert output.noun == "random sequences" and output.lengths.tolist() == [24] * 3
        assert influence(model, length=5).lengths.tolist() == [5] * 8

    def test_when_norms_are_exact(self, monkeypatch):
        model = example("mamba")
        batch = model.encode(ids=TEXTS[1:2])
        kinds = {exact: influence(model, batch, exact=exact).output for exact in (None, True, False)}
        assert kinds[None].exact and kinds[True].exact and not kinds[False].exact
        np.testing.assert_array_equal(kinds[None].norm, kinds[True].norm)
        assert not kinds[True].error.any() and kinds[False].error.all()
        monkeypatch.setattr(measure, "MAX_EXACT_COMPONENTS", 23)  # the model is 24 wide
        assert not influence(model, batch).output.exact and influence(model, batch, probes=24).output.exact

    @pytest.mark.parametrize(("options", "says"), [
        (dict(at="layer"), "unknown at 'layer'; allowed are output, layers; did you mean 'layers'"),
        (dict(of="hiden"), "did you mean 'hidden'"),
        (dict(positions="first"), "positions is 'first'; allowed are last, all or a whole number, or several"),
        (dict(positions=[4]), "text 1 has no position 4: it has 3 tokens; allowed are -3 to 2"),
        (dict(positions=[]), "positions is"),
        (dict(exact="yes"), "exact is 'yes'"),
        (dict(probes=1), "probes is 1; allowed is a whole number from 2 on"),
        (dict(recent=0), "recent is 0"),
        (dict(fit_from=-1), "fit_from is -1; allowed is a whole number from 0 on"),
        (dict(length=4), "give either texts"),
    ])  # fmt: skip
    def test_what_is_refused(self, model, options, says):
        refuses(says, influence, model, model.encode(ids=TEXTS), **options)

    def test_what_does_not_fit_the_model(self, model):
        pixels = ssmscope.load("demo/cifar10-mamba")
        for of_model, batch in ((model, pixels.encode(values=np.zeros((1, 4, 3)))), (pixels, model.encode(ids=TEXTS))):
            refuses("give it a batch of its own encode", influence, of_model, batch)
        refuses("give either texts", influence, model)
        refuses("from 2 on: the last is the class token", influence, pixels, length=1)
        with pytest.raises(InputError, match="is a classifier, with logits at the last position only"):
            influence(pixels, length=9, of="logits", positions="all")
        refuses("has no tokenizer", influence, model, "some text")
        refuses("given without its model", influence, model.trace(ids=TEXTS))

    def test_a_damaged_model_is_refused(self):
        damaged = example("mamba")
        with torch.no_grad():
            damaged.mixers[1].out_proj.weight[0, 0] = torch.nan
        with pytest.raises(InputError, match="gradients of the output are not finite on text 0: the model is damaged"):
            influence(damaged, damaged.encode(ids=TEXTS))
