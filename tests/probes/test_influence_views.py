"""Influence of every architecture: options and refusals, its table, terminal view, figure and files."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from drawn import drawn, outside, overlapping, parts_of
from examples import HALVES, TEXTS, random_example
from loud import loud

import ssmscope
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.probes.influence import influence, measure
from ssmscope.probes.influence.result import Influence


def example(name: str) -> Model:
    return Model(loud(random_example(name)), name=name)


@pytest.fixture(scope="module")
def model() -> Model:
    return example("mamba2")


@pytest.fixture(scope="module")
def found(model) -> Influence:
    return influence(model, model.encode(ids=TEXTS), at="layers", positions="all")


@pytest.fixture(scope="module")
def output() -> Influence:
    return influence(example("mamba"), length=24, sequences=3)


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
        assert not influence(model, batch).output.exact
        assert influence(model, batch, probes=24).output.exact

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (dict(at="layer"), "unknown at 'layer'; allowed are output, layers; did you mean 'layers'"),
            (dict(positions="first"), "positions is 'first'; allowed are last, all or a whole number, or several"),
            (dict(positions=[4]), "text 1 has no position 4: it has 3 tokens; allowed are -3 to 2"),
            (dict(positions=[]), "positions is"),
            (dict(positions=[1.5]), "positions is 1.5"),
            (dict(length=4), "give either texts"),
        ],
    )
    def test_what_is_refused(self, model, options, says):
        with pytest.raises(InputError, match=says) as caught:
            influence(model, model.encode(ids=TEXTS), **options)
        assert "\n" not in str(caught.value)

    def test_what_does_not_fit_the_model(self, model):
        pixels = ssmscope.load("demo/cifar10-mamba")
        for of_model, batch in ((model, pixels.encode(values=np.zeros((1, 4, 3)))), (pixels, model.encode(ids=TEXTS))):
            with pytest.raises(InputError, match="give it a batch of its own encode"):
                influence(of_model, batch)
        with pytest.raises(InputError, match="give either texts"):
            influence(model)
        with pytest.raises(InputError, match="from 2 on: the last is the class token"):
            influence(pixels, length=1)
        with pytest.raises(InputError, match="is a classifier, with logits at the last position only"):
            influence(pixels, length=9, of="logits", positions="all")
        with pytest.raises(InputError, match="has no tokenizer"):
            influence(model, "some text")
        with pytest.raises(InputError, match="given without its model"):
            influence(model.trace(ids=TEXTS))

    def test_a_damaged_model_is_refused(self):
        damaged = example("mamba")
        with torch.no_grad():
            damaged.mixers[1].out_proj.weight[0, 0] = torch.nan
        with pytest.raises(InputError, match="gradients of the output are not finite on text 0: the model is damaged"):
            influence(damaged, damaged.encode(ids=TEXTS))


class TestResult:
    def test_a_place_that_is_not_there(self, found, output):
        with pytest.raises(InputError, match="there is no 7; allowed are output, 0, 1"):
            found.distances(7)
        with pytest.raises(InputError, match="layers are measured with at='layers'"):
            output.distances(0)

    def test_figure(self, found, output):
        figure = found.figure()
        first, upper, lower, third = [axes for axes in figure.axes if axes.get_xlabel() or axes.get_title("left")]
        assert first.get_yscale() == "log" and len(first.lines) == len(found.layers) + 2
        black, line = first.lines[-2:]
        np.testing.assert_allclose(black.get_ydata(), np.exp(found.output.log_norm[:, 0]))
        decay = found.output.decay
        assert line.get_xdata().tolist() == [decay.first, decay.last]
        slope = np.diff(np.log(line.get_ydata()))[0] / np.diff(line.get_xdata())[0]
        assert slope == pytest.approx(-decay.rate.value)
        assert [bar.get_height() for bar in lower.patches] == [reach.recent(8).value for reach in found.layers]
        legends = [
            [text.get_text() for text in part.legends[0].get_texts()] for part in parts_of(figure) if part.legends
        ]
        assert legends[1] == ["50 %", "90 %", "95 %"] and legends[2][0] == "mean cosine"
        cosine = [own for own in third.lines if own.get_label() == "mean cosine"][0]
        assert cosine.get_ydata().tolist() == found.similarity.stream[:, 0, 0].tolist()
        assert [text.get_text() for text in third.get_xticklabels()] == ["emb.", "0", "1", "out"]

        first, second, third = output.figure().axes
        assert (
            second.get_xscale() == "log" and second.lines[0].get_ydata().tolist() == output.output.within[:, 0].tolist()
        )
        for known, title in ((True, "effective context"), (False, "within the text")):
            context = output.output.held + 8 if known else np.full_like(output.output.context, math.nan)
            reach = dataclasses.replace(output.output, context=context)
            second = dataclasses.replace(output, reaches=(reach, *output.reaches[1:])).figure().axes[1]
            marks = [own.get_xdata()[0] for own in second.lines if len(own.get_xdata()) == 1]
            counted = [reach.effective_context(share, within=not known) for share in (0.5, 0.9, 0.95)]
            assert marks == [k for k in counted if math.isfinite(k)]
            shown = [own.get_label() for own in second.lines if "%" in own.get_label()]
            assert len(shown) == 3 and all(title in each for each in shown)
        assert len(marks) == 3  # the text's own tokens always hold every share

    @pytest.mark.parametrize("size", [None, 8.6, 7, 3.3])
    def test_legends_lie_below_their_own_panels(self, found, output, size):
        for result in (found, output):
            figure, texts = drawn(result, size=size)
            assert overlapping(texts) == [] and outside(figure, texts) == []
