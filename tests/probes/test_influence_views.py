"""Influence of every architecture: options and refusals, its table, terminal view, figure and files."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from drawn import drawn, labels, outside, overlapping, parts_of
from examples import HALVES, TEXTS, random_example
from loud import loud
from transformers import MambaConfig, MambaForCausalLM

import ssmscope
from ssmscope.api.results import Result
from ssmscope.core import batching
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.probes.influence import influence, measure
from ssmscope.probes.influence.measure import name_places
from ssmscope.probes.influence.result import Influence
from ssmscope.render.numbers import number


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
        assert not influence(model, batch).output.exact
        assert influence(model, batch, probes=24).output.exact

    def test_provenance_has_what_was_asked(self, model):
        result = influence(model, model.encode(ids=TEXTS), positions=(2, 0), fit_from=2, probes=3, piece=50, seed=5)
        options = result.provenance["options"]
        assert options["positions"] == [2, 0] and options["fit_from"] == 2 and options["piece"] == 50
        assert options["sequences"] is None and result.provenance["seed"] == 5
        assert result.provenance["fingerprint"] == model.fingerprint

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (dict(at="layer"), "unknown at 'layer'; allowed are output, layers; did you mean 'layers'"),
            (dict(of="hiden"), "did you mean 'hidden'"),
            (dict(positions="first"), "positions is 'first'; allowed are last, all or a whole number, or several"),
            (dict(positions=[4]), "text 1 has no position 4: it has 3 tokens; allowed are -3 to 2"),
            (dict(positions=[]), "positions is"),
            (dict(positions=[1.5]), "positions is 1.5"),
            (dict(exact="yes"), "exact is 'yes'"),
            (dict(probes=1), "probes is 1; allowed is a whole number from 2 on"),
            (dict(recent=0), "recent is 0"),
            (dict(fit_from=-1), "fit_from is -1; allowed is a whole number from 0 on"),
            (dict(piece=True), "piece is True"),
            (dict(recent=None), "recent is not given"),
            (dict(seed=-1), "seed is -1"),
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
    def test_is_saved_and_read_back(self, found, output, tmp_path):
        for name, result in (("layers", found), ("output", output)):
            paths = result.save(tmp_path, name)
            assert {path.suffix for path in paths.values()} == {".json", ".csv", ".png", ".html"}
            again = Result.load(paths["json"])
            assert again == result and type(again) is Influence and again.output.decay == result.output.decay
            assert again.summary().equals(result.summary())

    def test_frame(self, found):
        frame = found.to_frame()
        assert list(frame.columns) == ["model", "part", "place", "distance", "measure", "value", "low", "high", "count"]
        assert not frame.duplicated(["part", "place", "distance", "measure"]).any()

        def row(part, place, measure, distance=None):
            own = frame[(frame.part == part) & (frame.place == place) & (frame.measure == measure)]
            own = own[own.distance.isna() if distance is None else own.distance == distance]
            return own.iloc[0]

        decay = found.layers[0].decay
        rate = row("decay", "0", "rate")
        assert (rate.value, rate.low, rate.high) == (decay.rate.value, decay.rate.low, decay.rate.high)
        assert row("decay", "1", "fit_to").value == found.layers[1].decay.last
        at = row("distance", "1", "share", 3)
        assert [at.value, at.low, at.high] == found.layers[1].share[3].tolist() and at["count"] == 11
        recency = row("recency", "output", "last 8")
        assert recency.value == found.output.recent(8).value
        context = row("context", "output", "90 %")
        known = found.output.context[:, 1]
        assert context.value == pytest.approx(found.output.effective_context(0.9), nan_ok=True)
        assert context["count"] == np.isfinite(known).sum()
        assert row("mixer", "1", "centred").value == found.similarity.estimate(1, "centred", "mixer").value
        assert row("stream", "output", "spread").high == found.similarity.estimate("output", "spread").high

    def test_summary_and_distances(self, found):
        summary = found.summary()
        assert summary.place.tolist() == ["output", "0", "1"]
        assert summary.decay_length[2] == found.layers[1].decay.length.value
        contexts = [reach.effective_context(0.5) for reach in found.reaches]
        assert summary.context_50.tolist() == pytest.approx(contexts, nan_ok=True)
        assert summary.not_reached_95.tolist() == [reach.not_reached(0.95) for reach in found.reaches]
        curve = found.distances(1)
        assert curve.equals(found.distances("1")) and curve.norm.tolist() == found.layers[1].norm[:, 0].tolist()
        assert (curve.q05 <= curve.q50).all() and (curve.q50 <= curve.q95).all()
        assert (curve.log_norm_low <= curve.log_norm + 1e-12).all()

    def test_a_band_is_named_where_there_is_one(self, model, output):
        one = influence(model, model.encode(ids=[[1, 2, 3, 4, 5]]))
        for result, band in ((output, True), (one, False)):
            texts = labels(result.figure())
            assert ("5–95 %" in texts) == band and "output, geometric mean" in texts

    def test_a_place_that_is_not_there(self, found, output):
        with pytest.raises(InputError, match="there is no 7; allowed are output, 0, 1"):
            found.distances(7)
        with pytest.raises(InputError, match="layers are measured with at='layers'"):
            output.distances(0)

    def test_terminal(self, found, output):
        for result in (found, output):
            shown = result.to_text(full=True)
            assert max(map(len, shown.splitlines())) <= 100 and "…" not in shown
            assert f"λ = {result.output.decay.rate.value:.3g}" in " ".join(shown.split())
            assert f"hold {100 * result.output.recent(8).value:.1f} %" in " ".join(shown.split())
        lines = found.to_text(full=True).splitlines()
        layer = next(line for line in lines if line.startswith("layer 1"))
        assert f"{found.layers[1].decay.length.value:.3g}" in layer
        assert number(found.similarity.estimate(1, part="mixer").value, 3) == layer.split()[-1]
        assert "3 random sequences of 24 tokens; exact." in " ".join(output.to_text(full=True).split())

    def test_words_for_what_is_not_there(self, found):
        """An estimate, one text, growth, a share that is not reached, and no line."""
        reach = found.output
        estimated = dataclasses.replace(reach, exact=False, error=np.full_like(reach.error, 0.25))
        shown = " ".join(dataclasses.replace(found, reaches=(estimated,)).to_text(full=True).split())
        assert "estimated with 8 random vectors, a norm's standard error is 25 %" in shown
        nothing = dataclasses.replace(reach.decay.rate, value=math.nan, low=math.nan, high=math.nan)
        growing = dataclasses.replace(nothing, value=-0.5)
        endless = dataclasses.replace(nothing, value=math.inf)
        for rate, length, context, words in (
            (nothing, nothing, math.nan, "too few"),
            (growing, endless, math.inf, "none"),
        ):
            decay = dataclasses.replace(reach.decay, rate=rate, length=length, r2=0.95)
            own = dataclasses.replace(reach, decay=decay, context=np.full_like(reach.context, context))
            changed = dataclasses.replace(found, reaches=(own,))
            shown = " ".join(changed.to_text(full=True).split())
            assert f"Decay: {words}" in shown and "90 % in 5" in shown
            for said in ("90 % not reached", "> not reached: at least half", "not within the texts' length"):
                assert (said in shown) == (rate is growing)
            for said in ("Effective context: not defined", "half of it in the last 3 of 6 tokens, 90 % in the last 5"):
                assert (said in shown) == (rate is nothing)

    def test_no_view_says_reached_and_not_reached_of_the_same_share(self, found):
        """Where no one rate fits, all views count the texts' own tokens; where one does, what is before them too."""
        reach = found.output
        held = np.array([[4.0, 6, 7], [4, 6, 7], [2, 6, 7]])
        reach = dataclasses.replace(reach, held=held, decay=dataclasses.replace(reach.decay, r2=0.25))
        for context, own in ((np.full((3, 3), math.nan), True), (held + 10, False)):
            result = dataclasses.replace(found, reaches=(dataclasses.replace(reach, context=context),))
            assert result.of_own_tokens == own
            shown = " ".join(result.to_text(full=True).split())
            (cells,) = [cells for (place,), cells in result._table().rows if place == "output"]
            assert [cell.value for cell in cells[3:6]] == (["4", "6", "7"] if own else ["14", "16", "17"])
            assert "not reached" not in shown and ("a text's own tokens" in shown) == own
            half = "half of it in the last 4 of 6 tokens, 90 % in the last 6" if own else "90 % of it within 16 tokens"
            assert half in result.headline
            assert ("90 %, within the text: 6" if own else "90 %, effective context: 16") in labels(result.figure())
            table = Influence.compare([result], [("a",)])
            assert dict(zip(table.columns, table.rows[0][1]))["90 % held within"].value == ("6" if own else "16")

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

    def test_layers_without_one_rate_show_what_the_texts_hold(self, found):
        bent = tuple(
            dataclasses.replace(reach, context=np.full_like(reach.context, math.nan)) for reach in found.reaches
        )
        upper = next(
            axes
            for axes in dataclasses.replace(found, reaches=bent).figure().axes
            if axes.get_title("left") == "effective context, tokens, within the text"
        )
        middle = next(line for line in upper.lines if line.get_label() == "90 %").get_ydata()
        assert middle.tolist() == [reach.effective_context(0.9, within=True) for reach in found.layers]

    @pytest.mark.filterwarnings("error")
    def test_a_single_token_and_long_names(self):
        torch.manual_seed(0)
        small = MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=9, state_size=2))
        for name in ("$m^{x$", "runs/" + "Wide-Model" * 20):
            result = influence(Model(small.eval(), name=name), length=1, sequences=1, at="layers")
            assert not result.output.decay.defined and "half of it in the last 1 of 1 tokens" in result.headline
            assert any("one text" in note for note in result.notes)
            assert "1 random sequence of 1 token; exact." in " ".join(str(result).split())
            figure = result.figure()
            figure.canvas.draw()
            edge = figure.get_window_extent().x1
            assert all(text.get_window_extent().x1 < edge for text in figure.texts)
            assert name[:4] in figure.texts[0].get_text() and "<img" in result.to_html()


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (["output"], "the output"),
        (["3"], "layer 3"),
        (["0", "2"], "layers 0, 2"),
        (["output", "0", "2"], "the output and layers 0, 2"),
        (["output", "1"], "the output and layer 1"),
    ],
)
def test_name_places(places, words):
    assert name_places(places) == words
