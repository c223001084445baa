"""The insertion sweep on models that forget at a known rate, against slow references, and as its users meet it."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from bags import LABELS
from fading import fading, log_odds
from refusals import refuses
from transformers import Mamba2Config, MambaConfig, MambaForCausalLM
import ssmscope
from ssmscope.attacks.curves import true_log_odds
from ssmscope.attacks.insertion import insertion_sweep
from ssmscope.attacks.insertion.measure import mean, measure
from ssmscope.attacks.insertion.places import inserted
from ssmscope.attacks.insertion.result import InsertionCurve, InsertionSweep, curve_table, place_name
from ssmscope.core.bootstrap import share
from ssmscope.data.prompts import TASK_PROMPTS
from ssmscope.data.text import TextData, text_data
from ssmscope.errors import InputError
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.zoo.documents import byte_tokenizer

WEIGHTS = {"good": 2.0, "bad": -2.0, "film": 0.25, "dull": -0.9, "fine": 0.7, "a": 0.0, "Is": 0.3, "it": -0.1, "?": 0.2}


def reviews(n: int = 40, seed: int = 0, words: int = 4) -> TextData:
    """Return texts of so many words, with labels that the words' weights decide up to noise."""
    draw = np.random.default_rng(seed)
    names = list(WEIGHTS)[:6]
    texts = [" ".join(names[i] for i in draw.integers(0, 6, words)) for _ in range(n)]
    sums = np.array([sum(WEIGHTS[word] for word in text.split()) for text in texts])
    labels = (sums + draw.normal(0, 0.7, n) > 0).astype(int).tolist()
    return text_data("reviews", "test", texts, labels, LABELS)


def signed(data: TextData, odds: list[float]) -> np.ndarray:
    """Log-odds of the true class from those of "good"."""
    return np.where(np.array(data.labels) == 1, odds, -np.array(odds))


class TestClosedForm:
    @pytest.mark.parametrize("language", [False, True])
    def test_every_place_of_a_model_that_forgets(self, language):
        """A text of four words has five places; which share is which is written out."""
        steps = {"film": 1.7, "dull": 0.6}
        model, data = fading(WEIGHTS, decay=0.4, steps=steps, ending=0.15, language=language), reviews()
        template = dict(template="Is it {content} ?", words=("bad", "good")) if language else {}
        end = dict(decay=0.4, steps=steps, ending=None if language else 0.15)
        places = [0, 0.12, 0.13, 0.5, 0.62, 0.63, 1]
        found = insertion_sweep(model, data, insert="dull bad film", places=places, **template)
        (curve,) = found.curves
        splits = dict(zip(places, (0, 0, 1, 2, 2, 3, 4)))
        before, after = (["Is", "it"], ["?"]) if language else ([], [])
        phrase = ["dull", "bad", "film"]

        def odds(build) -> np.ndarray:
            rows = [log_odds(build(text.split()), WEIGHTS, **end) for text in data.texts]
            return signed(data, rows)

        clean = odds(lambda words: [*before, *words, *after])
        expected = {
            p: odds(lambda words, k=k: [*before, *words[:k], *phrase, *words[k:], *after]) for p, k in splits.items()
        }
        if language:
            expected["first"] = odds(lambda words: [*phrase, *before, *words, *after])
            expected["last"] = odds(lambda words: [*before, *words, *after, *phrase])
        got = {place.share: place for place in curve.places}
        if language:
            assert [curve.places[0].name, curve.places[-1].name] == ["before the template", "after the template"]
            del got[None]
            got |= {"first": curve.places[0], "last": curve.places[-1]}
        assert got.keys() == expected.keys()
        for key, place in got.items():
            assert place.log_odds_change.value == pytest.approx((expected[key] - clean).mean(), abs=1e-4)
            assert place.accuracy.value == (expected[key] > 0).mean()
        everywhere = np.stack(list(expected.values())) > 0
        assert curve.worst.value == everywhere.all(0).mean() < min(place.accuracy.value for place in curve.places)
        assert found.worst == curve.worst and found.clean.value == (clean > 0).mean()
        assert curve.hardest.accuracy.value == min((odds > 0).mean() for odds in expected.values())


def swept(right: list[list[int]], odds: list[list[float]] | None = None) -> tuple[InsertionSweep, InsertionCurve]:
    """Return a sweep of one phrase by hand: right answers when clean and at each place, and log-odds."""
    rows = np.array(right)
    spots = [(place_name(share), share) for share in np.linspace(0, 1, len(rows) - 1).tolist()]
    own = None if odds is None else np.array(odds, dtype=float)
    curve = measure("a $phrase", spots, 1 - rows, np.zeros(rows.shape[1], dtype=int), own, seed=0)
    data = dict(name="own", split="test", fingerprint="0" * 16, examples=rows.shape[1])
    provenance = dict(model="runs/mine", data=data, options={"template": None})
    clean = mean(rows[0], seed=0)
    return InsertionSweep(provenance, None, (curve,), curve.worst, curve.worst_drop, clean=clean), curve


class TestHardest:
    """A place is called the hardest only where the paired differences tell it from others."""

    def right(self, *lost: range, examples: int = 100) -> list[list[int]]:
        return [[1] * examples, *([int(at not in each) for at in range(examples)] for each in lost)]

    @pytest.mark.parametrize(("lost", "places", "says"), [
        ((20, 45, 30), (1,), "0.550 with “a $phrase” at its hardest place (50 %), 0.550 where the place may differ"),
        ((20, 45, 44), (1, 2), "0.550 with “a $phrase” at its hardest place (50 %, indistinguishable from 1 other), "),
        ((20, 22, range(79, 100)), (1, 2, 0), "0.780 to 0.800 with “a $phrase”, at no place clearly lowest, 0.570 wh"),
        ((20, 22, 21, 5), (1, 2, 0), "0.780 to 0.950 with “a $phrase”, at no place clearly lowest, 0.780 wh"),
        ((20, 20), (0, 1), "0.800 with “a $phrase”, at no place clearly lowest, 0.800 where"),
    ])  # fmt: skip
    def test_it_is_told_from_all_some_or_none(self, lost, places, says):
        result, found = swept(self.right(*(range(each) if isinstance(each, int) else each for each in lost)))
        assert found.hardest_places == places
        assert result.headline.startswith(f"Insertion sweep of runs/mine: accuracy 1.000 clean, {says}")

    @pytest.mark.parametrize(("lowest", "says"), [
        ([0] * 10 + [1] * 60 + [2] * 30, "most often lowest at 50 %, for 0.600 [0."),
        ([0] * 5 + [1] * 48 + [2] * 47, "most often lowest at 50 %, indistinguishable from 1 other, for 0.480 [0."),
        ([0] * 32 + [1] * 34 + [2] * 34, "clearly more often than the others."),
    ])  # fmt: skip
    def test_where_log_odds_are_lowest(self, lowest, says):
        odds = [[1.0] * 100, *([0.5 - (place == each) for each in lowest] for place in range(3))]
        result, found = swept(self.right(range(20), range(45), range(30)), odds)
        assert found.lowest_odds[0] == 1
        assert says in curve_table(result.curves[0], result.clean).note


class TestTexts:
    def test_where_the_phrase_is_put(self):
        assert [inserted("one two\nthree", "x y", k) for k in range(4)] == [
            "x y one two\nthree", "one x y two\nthree", "one two x y\nthree", "one two\nthree x y",
        ]  # fmt: skip
        assert inserted(" a ", "x", 0) == " x a " and inserted(" a ", "x", 1) == " a x "

    def test_all_places_are_one_wave(self, monkeypatch):
        from ssmscope.evaluation import Evaluator

        asked = []
        scores = Evaluator.scores
        monkeypatch.setattr(Evaluator, "scores", lambda self, texts: asked.append(list(texts)) or scores(self, texts))
        insertion_sweep(fading(WEIGHTS), text_data("d", "all", ["good a", "bad"], [1, 0], LABELS), insert="a", places=2)
        assert asked == [["good a", "bad", "a good a", "a bad", "good a a", "bad a"]]

    def test_white_space_at_the_end_of_a_template(self, monkeypatch):
        from ssmscope.evaluation import Evaluator

        asked = []
        scores = Evaluator.scores
        monkeypatch.setattr(Evaluator, "scores", lambda self, texts: asked.extend(texts) or scores(self, texts))
        model = fading(WEIGHTS, language=True)
        data = text_data("d", "all", ["film", "a"], [1, 0], LABELS)
        found = insertion_sweep(
            model, data, insert=" bad ", places=[1], template="{content} Is it ?\n", words=["bad", "good"]
        )
        assert [place.name for place in found.curves[0].places] == ["100 %", "after the template"]
        assert asked[::2] == ["film Is it ?\n", "film bad Is it ?\n", "film Is it ?\nbad"]
        assert found.curves[0].places[0].log_odds_change.value == pytest.approx(
            0, abs=1e-6
        )  # −2 of one, +2 of the other

    @pytest.mark.parametrize(("template", "outside"), [
        (" \n{content}\n", []),
        (" {content} ?", ["after the template"]),
        ("Is {content} \n", ["before the template"]),
    ])  # fmt: skip
    def test_white_space_of_a_template_is_no_place(self, template, outside):
        given = dict(insert="bad", places=[0.5], template=template, words=["bad", "good"])
        found = insertion_sweep(fading(WEIGHTS, language=True), reviews(), **given)
        assert [place.name for place in found.curves[0].places if place.share is None] == outside


class TestLanguageModels:
    @pytest.fixture
    def model(self):
        torch.manual_seed(3)
        config = MambaConfig(vocab_size=256, hidden_size=24, num_hidden_layers=2, state_size=8, initializer_range=0.3)
        return ssmscope.Model(MambaForCausalLM(config).eval(), byte_tokenizer(), "bytes")

    def likelihood(self, model, text: str, word: str) -> float:
        ids = [*(text + " " + word).encode()]
        log_p = model.logits(model.encode(ids=ids))[0].double().log_softmax(-1)
        return sum(log_p[at - 1, ids[at]].item() for at in range(len(text.encode()), len(ids)))

    def test_against_a_slow_reference(self, model):
        data = text_data("d", "all", ["one two", "three four five six", "seven"], [1, 0, 1], ("no", "yes"))
        words = ["never", "ok"]
        found = insertion_sweep(model, data, insert="x y", places=[0.5], template="Q: {content} A:", words=words)
        texts = {
            "clean": ["Q: one two A:", "Q: three four five six A:", "Q: seven A:"],
            "before the template": ["x y Q: one two A:", "x y Q: three four five six A:", "x y Q: seven A:"],
            "50 %": ["Q: one x y two A:", "Q: three four x y five six A:", "Q: seven x y A:"],
            "after the template": ["Q: one two A: x y", "Q: three four five six A: x y", "Q: seven A: x y"],
        }
        scores = {
            name: np.array([[self.likelihood(model, text, word) for word in words] for text in rows])
            for name, rows in texts.items()
        }
        odds = {name: signed(data, (rows[:, 1] - rows[:, 0]).tolist()) for name, rows in scores.items()}
        assert found.clean_log_odds.value == pytest.approx(odds["clean"].mean(), abs=1e-4)
        assert [place.name for place in found.curves[0].places] == list(texts)[1:]
        for place in found.curves[0].places:
            assert place.accuracy.value == pytest.approx((odds[place.name] > 0).mean())
            assert place.log_odds_change.value == pytest.approx((odds[place.name] - odds["clean"]).mean(), abs=1e-4)

    def test_generated_answers_have_no_log_odds(self, model):
        data = text_data("d", "all", ["one two", "three"], [1, 0], ("no", "yes"))
        found = insertion_sweep(
            model, data, insert="x", places=2, template="{content}:", words=["q", "z"], scoring="generated"
        )
        assert found.clean_log_odds is None and found.curves[0].places[0].worst_here is None
        assert found.clean == share(0, 2) and math.isnan(found.curves[0].places[0].drop.value)
        assert any("100.0 % of the generated answers name no class" in note for note in found.notes)
        assert any("the clean accuracy is 0" in note for note in found.notes)
        assert len(found.figure().axes) == 1 and "log_odds" not in found.to_frame() and "nan" not in str(found)
        assert type(found).from_dict(json.loads(found.to_json())) == found

    def test_a_known_data_set_brings_its_prompt(self, model):
        texts = ("a fine film", "a dull film")
        data = text_data("sst2", "test", texts, [1, 0], ("negative", "positive"))
        found = insertion_sweep(model, data, places=2)
        own = TASK_PROMPTS["sst2"]
        again = insertion_sweep(model, data, places=2, template=own.templates[0], words=own.words)
        assert found.provenance["options"]["template"] == own.templates[0] and found.curves == again.curves
        assert found.provenance["options"]["words"] == ["negative", "positive"]

    def test_what_a_language_model_needs(self, model):
        data = text_data("d", "all", ["one two", "three"], [1, 0], ("no", "yes"))
        refuses("is a language model: give template=…, which asks for the class", insertion_sweep, model, data)
        with pytest.raises(InputError, match="give words=…, what it says for no, yes, in this order"):
            insertion_sweep(model, data, template="{content}:")
        with pytest.raises(InputError, match="words are a; d has 2 classes, no, yes: give one for each, in this order"):
            insertion_sweep(model, data, template="{content}:", words=["a"])
        with pytest.raises(InputError, match="words are ab; d has 2 classes, no, yes"):
            insertion_sweep(model, data, template="{content}:", words="ab")
        with pytest.raises(InputError, match="did you mean {content} by '{text}'"):
            insertion_sweep(model, data, template="{text}:", words=["a", "b"])


class TestMeasure:
    def test_log_odds_are_those_of_far_scores_too(self):
        scores = np.array([[2000.0, 0.0, 0.0], [0.0, -3000.0, -3000.0]])
        assert true_log_odds(scores, np.array([0, 1])) == pytest.approx([2000 - math.log(2), -3000.0])


class TestOptions:
    @pytest.mark.parametrize(("options", "says"), [
        (dict(insert=[]), "insert is empty"),
        (dict(places=1), "places is 1; allowed are a number of places from 2 on, or shares from 0 to 1"),
        (dict(words=["a", "b"]), "is a classifier"),
        (dict(template="film"), "has no {content}"),
    ])  # fmt: skip
    def test_what_is_refused(self, options, says):
        refuses(says, insertion_sweep, fading(WEIGHTS), reviews(), **options)

    def test_data_of_another_kind(self):
        model, data = fading(WEIGHTS), reviews()
        refuses(r"data is \[1\]: give the name of a data set", insertion_sweep, model, [1])
        refuses(r"reviews \(test\) has no example", insertion_sweep, model, data.take([]))
        refuses("has no tokenizer", insertion_sweep, dataclasses.replace(model, tokenizer=None), data)
        with pytest.raises(InputError, match="has the classes cat, dog; fading tells apart bad, good"):
            insertion_sweep(model, dataclasses.replace(data, label_names=("cat", "dog")))
        backbone = Mamba2Config(
            vocab_size=1, hidden_size=8, num_heads=2, head_dim=8, n_groups=1, state_size=4, num_hidden_layers=1
        )
        pixels = SSMForSequenceClassification(SSMClassifierConfig(backbone, channels=1))
        refuses("reads pixels, but reviews holds texts", insertion_sweep, ssmscope.Model(pixels), data)

    def test_a_cache_and_a_limit_change_no_number(self, tmp_path):
        model, data = fading(WEIGHTS, decay=0.2), reviews()
        options = dict(insert=["a", "bad"], places=4, limit=20, seed=3)
        first = insertion_sweep(model, data, cache=tmp_path / "cache", **options)
        again = insertion_sweep(model, data, cache=tmp_path / "cache", **options)
        sample = insertion_sweep(model, data.sample(20, seed=3), insert=["a", "bad"], places=4, seed=3)
        assert first.curves == again.curves == sample.curves and first.worst == sample.worst
        assert first.provenance["data"] == sample.provenance["data"] and first.provenance["data"]["examples"] == 20

    def test_classes_in_another_order(self):
        model, data = fading(WEIGHTS, decay=0.2), reviews()
        turned = text_data("reviews", "test", data.texts, [1 - y for y in data.labels], LABELS[::-1])
        assert insertion_sweep(model, turned, places=2).curves == insertion_sweep(model, data, places=2).curves

    def test_words_that_the_tokenizer_does_not_know(self):
        notes = insertion_sweep(fading(WEIGHTS), reviews(), insert=["good riddance", "a"], places=2).notes
        assert notes == ("the tokenizer does not know 1 of the 2 tokens of “good riddance”",)


class TestResult:
    @pytest.fixture
    def result(self):
        return insertion_sweep(fading(WEIGHTS, decay=0.3), reviews(), insert=["dull", "a bad film"], places=5)

    def test_places_outside_the_content(self):
        result = insertion_sweep(fading(WEIGHTS), reviews(), insert="dull", places=3, template="Is {content} ?")
        figure = result.figure()
        singles = [line.get_xdata()[0] for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
        assert len(singles) == 2 and singles[0] < 0 and singles[1] > 1
        figure.canvas.draw()
        labels = [label.get_window_extent() for label in figure.axes[1].get_xticklabels()]
        assert all(a.x1 < b.x0 for a, b in zip(labels, labels[1:]))
        assert labels[0].x0 > 0 and labels[-1].x1 < figure.get_window_extent().x1
