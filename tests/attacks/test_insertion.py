"""The insertion sweep on models that forget at a known rate, against slow references, and as its users meet it."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from bags import LABELS
from drawn import labels
from fading import fading, log_odds
from transformers import Mamba2Config, MambaConfig, MambaForCausalLM

import ssmscope
from ssmscope.attacks.curves import true_log_odds
from ssmscope.attacks.insertion import insertion_sweep
from ssmscope.attacks.insertion.measure import mean, measure
from ssmscope.attacks.insertion.places import inserted
from ssmscope.attacks.insertion.result import (
    MAX_SHOWN_PHRASES,
    InsertionCurve,
    InsertionSweep,
    curve_table,
    place_name,
)
from ssmscope.core.bootstrap import Estimate
from ssmscope.data.language import byte_tokenizer
from ssmscope.data.prompts import TASK_PROMPTS
from ssmscope.data.text import TextData, text_data
from ssmscope.errors import InputError
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification

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
    def test_a_model_that_forgets_nothing_cares_for_no_place(self):
        model, data = fading(WEIGHTS, ending=0.05), reviews()
        found = insertion_sweep(model, data, insert=["dull fine", "bad"], places=3)
        clean = signed(data, [log_odds(text.split(), WEIGHTS, ending=0.05) for text in data.texts])
        assert found.clean.value == (clean > 0).mean()
        assert found.clean_log_odds.value == pytest.approx(clean.mean(), abs=1e-5)
        for curve, weight in zip(found.curves, (-0.2, -2.0)):
            change = np.where(np.array(data.labels) == 1, weight, -weight)
            right, was_right = clean + change > 0, clean > 0
            for place in curve.places:
                assert place.log_odds_change.value == pytest.approx(change.mean(), abs=1e-5)
                assert place.accuracy.value == right.mean()
                assert place.drop.value == pytest.approx(1 - right.sum() / was_right.sum())
                assert place.flipped.value == pytest.approx((was_right & ~right).sum() / was_right.sum())
            assert curve.worst == curve.places[0].accuracy and curve.worst_drop == curve.places[0].drop

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

    @pytest.mark.parametrize(("decay", "share"), [(0.5, 1.0), (-0.5, 0.0)])
    def test_the_hardest_place_is_where_the_memory_is_worst(self, decay, share):
        """The last words count most where states decay, and the first words where they grow."""
        model = fading(WEIGHTS, decay=decay)
        texts = ["film good a film film", "good film film film a", "fine good film film film"] * 5
        data = text_data("praise", "test", texts, [1] * 15, LABELS)
        found = insertion_sweep(model, data, insert="bad", places=6)
        odds = [place.log_odds_change.value for place in found.curves[0].places]
        assert found.curves[0].places[int(np.argmin(odds))].share == share
        assert [place.worst_here.value for place in found.curves[0].places] == [
            place.share == share for place in found.curves[0].places
        ]

    def test_the_last_words_decide_for_a_model_that_sees_no_others(self):
        """A memoryless model, whose convolution sees three words before [CLS]: only a suffix of three costs it."""
        torch.manual_seed(0)
        backbone = Mamba2Config(
            **dict(vocab_size=12, hidden_size=16, state_size=4, num_heads=4, head_dim=8, n_groups=1, expand=2),
            **dict(num_hidden_layers=1, pad_token_id=0, bos_token_id=2, eos_token_id=2),
        )
        config = SSMClassifierConfig(backbone, num_labels=2, id2label=dict(enumerate(LABELS)))
        module, tokenizer = SSMForSequenceClassification(config), fading(WEIGHTS).tokenizer
        mixer = module.backbone.layers[0].mixer
        with torch.no_grad():
            mixer.A_log.fill_(12.0)
        mixer.A_log.requires_grad_(False)
        data = ended(300, seed=1)
        batch = ssmscope.Model(module, tokenizer).encode(data.texts)
        optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], 2e-2)
        with ssmscope.fast_scan(module, mask=batch.mask):
            for _ in range(40):
                optimizer.zero_grad()
                module(batch.input_ids, batch.mask.long(), labels=torch.tensor(data.labels)).loss.backward()
                optimizer.step()
        model, test = ssmscope.Model(module.eval(), tokenizer), ended(100, seed=2)
        found = insertion_sweep(model, test, insert="a film a", places=[0, 0.3, 0.6, 1])
        *others, suffix = found.curves[0].places
        assert found.clean.value > 0.97
        for place in others:
            assert place.accuracy == found.clean and place.drop == Estimate(0, 0, 0)
            assert abs(place.log_odds_change.value) < 1e-5 and place.flipped.value == 0
        assert found.curves[0].hardest is suffix and 0.3 < suffix.accuracy.value < 0.7
        majority = max(np.bincount(test.labels)) / 100
        assert suffix.accuracy.value in (majority, 1 - majority)  # every text ends alike
        assert found.worst.value <= suffix.accuracy.value


def ended(n: int, seed: int) -> TextData:
    """Return ten words, of which the last one is the label."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 2, n)
    rows = [[*np.array(list(WEIGHTS)[:6])[draw.integers(0, 6, 9)], LABELS[label]] for label in labels]
    return text_data("ended", "test", [" ".join(row) for row in rows], labels.tolist(), LABELS)


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

    def test_one_that_is_told_from_all(self):
        result, found = swept(self.right(range(20), range(45), range(30)))
        assert found.hardest_places == (1,) and found.places[1].accuracy.high > found.places[2].accuracy.low
        assert result.headline == (
            "Insertion sweep of runs/mine: accuracy 1.000 clean, 0.550 with “a $phrase” at its hardest place (50 %), "
            "0.550 where the place may differ by example"
        )

    def test_one_that_is_told_from_some(self):
        result, found = swept(self.right(range(20), range(45), range(44)))
        assert found.hardest_places == (1, 2) and result.curves[0].hardest.name == "50 %"
        assert "0.550 with “a $phrase” at its hardest place (50 %, indistinguishable from 1 other), " in result.headline

    def test_none(self):
        result, found = swept(self.right(range(20), range(22), range(79, 100)))
        assert found.hardest_places == (1, 2, 0)
        assert "clean, 0.780 to 0.800 with “a $phrase”, at no place clearly lowest, 0.570 wh" in result.headline
        most = swept(self.right(range(20), range(22), range(21), range(5)))[0]  # told from one of three others
        assert most.curves[0].hardest_places == (1, 2, 0)
        assert "clean, 0.780 to 0.950 with “a $phrase”, at no place clearly lowest, 0.780 wh" in most.headline
        result, _ = swept(self.right(range(20), range(20)))
        assert "clean, 0.800 with “a $phrase”, at no place clearly lowest, 0.800 where" in result.headline

    @pytest.mark.parametrize(
        ("lowest", "says"),
        [
            ([0] * 10 + [1] * 60 + [2] * 30, "most often lowest at 50 %, for 0.600 [0."),
            ([0] * 5 + [1] * 48 + [2] * 47, "most often lowest at 50 %, indistinguishable from 1 other, for 0.480 [0."),
            (
                [0] * 32 + [1] * 34 + [2] * 34,
                "clearly more often than the others.",
            ),
        ],
    )
    def test_where_log_odds_are_lowest(self, lowest, says):
        odds = [[1.0] * 100, *([0.5 - (place == each) for each in lowest] for place in range(3))]
        result, found = swept(self.right(range(20), range(45), range(30)), odds)
        assert found.lowest_odds[0] == 1
        assert says in curve_table(result.curves[0], result.clean).note


class TestTexts:
    def test_where_the_phrase_is_put(self):
        assert [inserted("one two\nthree", "x y", k) for k in range(4)] == [
            "x y one two\nthree",
            "one x y two\nthree",
            "one two x y\nthree",
            "one two\nthree x y",
        ]
        assert inserted(" a ", "x", 0) == " x a " and inserted(" a ", "x", 1) == " a x "

    def test_a_suffix_is_the_text_and_the_phrase(self):
        """A shipped model is run plainly."""
        model = ssmscope.load("demo/sst2-mamba")
        texts = ["a gripping , beautifully acted film .", "dull and far too long .", "i liked it"]
        data = text_data("three", "test", texts, [1, 0, 1], ("negative", "positive"))
        found = insertion_sweep(model, data, places=[0, 1])
        for place, build in zip(found.curves[0].places, ("and true is true {}", "{} and true is true")):
            logits = model.logits(model.encode([build.format(text) for text in texts])).double().numpy()
            plain = model.logits(model.encode(texts)).double().numpy()
            odds, clean = (np.array([r[y] - r[1 - y] for r, y in zip(rows, data.labels)]) for rows in (logits, plain))
            assert place.accuracy.value == pytest.approx((odds > 0).mean())
            assert place.log_odds_change.value == pytest.approx((odds - clean).mean(), abs=1e-5)
        assert found.provenance["options"]["insert"] == ["and true is true"]

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

    @pytest.mark.parametrize(
        ("template", "outside"),
        [
            (" \n{content}\n", []),
            (" {content} ?", ["after the template"]),
            ("Is {content} \n", ["before the template"]),
        ],
    )
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
        assert found.clean == Estimate(0, 0, 0) and math.isnan(found.curves[0].places[0].drop.value)
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
        with pytest.raises(InputError, match="is a language model: give template=…, which asks for the class"):
            insertion_sweep(model, data)
        with pytest.raises(InputError, match="give words=…, what it says for no, yes, in this order"):
            insertion_sweep(model, data, template="{content}:")
        with pytest.raises(InputError, match="words are a; d has 2 classes, no, yes: give one for each, in this order"):
            insertion_sweep(model, data, template="{content}:", words=["a"])
        with pytest.raises(InputError, match="words are ab; d has 2 classes, no, yes"):
            insertion_sweep(model, data, template="{content}:", words="ab")
        with pytest.raises(InputError, match="did you mean {content} by '{text}'"):
            insertion_sweep(model, data, template="{text}:", words=["a", "b"])


class TestMeasure:
    def test_against_loops(self):
        draw = np.random.default_rng(0)
        labels, scores = draw.integers(0, 3, 50), draw.normal(size=(5, 50, 3))
        scores[2] = scores[1]  # a place that ties with another everywhere
        odds = true_log_odds(scores, labels)
        for place in range(5):
            for row, label in enumerate(labels):
                p = np.exp(scores[place, row]) / np.exp(scores[place, row]).sum()
                assert odds[place, row] == pytest.approx(math.log(p[label] / (1 - p[label])))
        answers = scores.argmax(-1)
        right = answers == labels
        found = measure("", [("", 0.0)] * 4, answers, labels, odds, seed=0)
        worst = np.zeros(4)
        for row in range(50):
            lowest = [place for place in range(4) if odds[1 + place, row] == min(odds[1:, row])]
            worst[lowest] += 1 / len(lowest) / 50
        flipped = [(right[0] & (answers[1 + place] != answers[0])).sum() / right[0].sum() for place in range(4)]
        for place, one in enumerate(found.places):
            assert one.accuracy.value == right[1 + place].mean()
            assert one.drop.value == pytest.approx(1 - right[1 + place].sum() / right[0].sum())
            assert one.flipped.value == pytest.approx(flipped[place])
            assert one.log_odds_change.value == pytest.approx((odds[1 + place] - odds[0]).mean())
            assert one.worst_here.value == pytest.approx(worst[place])
        assert found.worst.value == np.mean([right[1:, row].all() for row in range(50)])
        assert found.worst_drop.value == pytest.approx(1 - found.worst.value / right[0].mean())
        assert found.places[0] == found.places[1]  # the same numbers have the same resamples

    def test_log_odds_are_those_of_far_scores_too(self):
        scores = np.array([[2000.0, 0.0, 0.0], [0.0, -3000.0, -3000.0]])
        assert true_log_odds(scores, np.array([0, 1])) == pytest.approx([2000 - math.log(2), -3000.0])

    def test_intervals_are_paired(self):
        """Nested hits: drop and change vary by the few examples between, not by all."""
        right = np.arange(400) < np.array([[300], [290]])
        odds = np.stack([np.zeros(400), np.full(400, -0.5)])
        found = measure("", [("", 0.0)], (~right).astype(int), np.zeros(400, dtype=int), odds, seed=0)
        (one,) = found.places
        assert one.drop.value == pytest.approx(1 / 30) and 0.013 < one.drop.low < one.drop.high < 0.056
        assert one.log_odds_change == Estimate(-0.5, -0.5, -0.5)
        assert 0.66 < one.accuracy.low < 0.71 < 0.74 < one.accuracy.high < 0.78


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (dict(insert=""), "'' was given to insert; give a phrase of at least one word"),
            (dict(insert=["a", " \n"]), "' .n' was given to insert"),
            (dict(insert=[]), "insert is empty"),
            (dict(insert=["a", " a "]), "the phrase 'a' is given twice"),
            (dict(places=1), "places is 1; allowed are a number of places from 2 on, or shares from 0 to 1"),
            (dict(places=True), "places is True"),
            (dict(places=[]), "places is empty"),
            (dict(places=[0.5, 1.5]), "places has 1.5"),
            (dict(places="half"), "places is 'half'; allowed is a whole number"),
            (dict(places=[0.5, 0.5]), "places names 0.5 twice"),
            (dict(limit=0), "limit is 0; allowed is a whole number from 1 on"),
            (dict(seed=-1), "seed is -1"),
            (dict(words=["a", "b"]), "is a classifier"),
            (dict(template="film"), "has no {content}"),
            (dict(scoring="likelyhood"), "did you mean 'likelihood'"),
        ],
    )
    def test_what_is_refused(self, options, says):
        with pytest.raises(InputError, match=says) as caught:
            insertion_sweep(fading(WEIGHTS), reviews(), **options)
        assert "\n" not in str(caught.value)

    def test_data_of_another_kind(self):
        model, data = fading(WEIGHTS), reviews()
        with pytest.raises(InputError, match=r"data is \[1\]: give the name of a data set"):
            insertion_sweep(model, [1])
        with pytest.raises(InputError, match=r"reviews \(test\) has no example"):
            insertion_sweep(model, data.take([]))
        with pytest.raises(InputError, match="has no tokenizer"):
            insertion_sweep(dataclasses.replace(model, tokenizer=None), data)
        with pytest.raises(InputError, match="has the classes cat, dog; fading tells apart bad, good"):
            insertion_sweep(model, dataclasses.replace(data, label_names=("cat", "dog")))
        backbone = Mamba2Config(
            vocab_size=1, hidden_size=8, num_heads=2, head_dim=8, n_groups=1, state_size=4, num_hidden_layers=1
        )
        pixels = SSMForSequenceClassification(SSMClassifierConfig(backbone, channels=1))
        with pytest.raises(InputError, match="reads pixels, but reviews holds texts"):
            insertion_sweep(ssmscope.Model(pixels), data)

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

    def test_is_saved_and_read_back(self, result, tmp_path):
        paths = result.save(tmp_path, "insertion")
        assert {path.suffix for path in paths.values()} == {".json", ".csv", ".png", ".html"}
        again = ssmscope.Result.load(paths["json"])
        assert again == result and type(again) is type(result) and again.kind == "insertion"

    def test_frame(self, result):
        frame = result.to_frame()
        assert frame.part.tolist() == ["clean", *["place"] * 5, "worst", *["place"] * 5, "worst", "worst"]
        assert frame.share[1:6].tolist() == [0, 0.25, 0.5, 0.75, 1] and frame.place[5] == "100 %"
        place, row = result.curves[1].places[3], frame.iloc[10]
        assert (row.phrase, row.place, row.accuracy) == ("a bad film", "75 %", place.accuracy.value)
        assert row["drop"] == 100 * place.drop.value and row.log_odds == place.log_odds_change.value
        assert row.log_odds_low <= row.log_odds <= row.log_odds_high and row.flipped == place.flipped.value
        assert frame.iloc[-1].phrase == "any phrase" and frame.iloc[-1].accuracy == result.worst.value
        assert frame.iloc[6].accuracy == result.curves[0].worst.value

    def test_terminal(self, result):
        shown = result.to_text(full=True)
        for part in (
            "“dull”",
            "“a bad film”",
            "worst of each",
            "75 %",
            "most often lowest at",
            f"{result.worst}",
        ):
            assert part in shown
        assert max(map(len, shown.splitlines())) <= 100 and "…" not in shown

    def test_figure(self, result):
        upper, lower = result.figure().axes
        drawn = [line for line in upper.lines if len(line.get_xdata()) == 5]
        assert [line.get_ydata().tolist() for line in drawn] == [
            [place.accuracy.value for place in curve.places] for curve in result.curves
        ]
        assert drawn[0].get_xdata().tolist() == [0, 0.25, 0.5, 0.75, 1]
        changes = [line for line in lower.lines if len(line.get_xdata()) == 5]
        assert changes[1].get_ydata().tolist() == [p.log_odds_change.value for p in result.curves[1].places]

    def test_places_outside_the_content(self):
        result = insertion_sweep(fading(WEIGHTS), reviews(), insert="dull", places=3, template="Is {content} ?")
        figure = result.figure()
        singles = [line.get_xdata()[0] for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
        assert len(singles) == 2 and singles[0] < 0 and singles[1] > 1
        figure.canvas.draw()
        labels = [label.get_window_extent() for label in figure.axes[1].get_xticklabels()]
        assert all(a.x1 < b.x0 for a, b in zip(labels, labels[1:]))
        assert labels[0].x0 > 0 and labels[-1].x1 < figure.get_window_extent().x1

    def test_names_in_the_figure(self, result):
        """A $ starts no formula, and whatever their length names stay on the paper."""
        data = {**result.provenance["data"], "name": "$d_{$" * 40}
        curves = (dataclasses.replace(result.curves[0], phrase="$x^{$ " * 60), result.curves[1])
        provenance = {**result.provenance, "model": "runs/" + "Wide-Model" * 20, "data": data}
        figure = dataclasses.replace(result, provenance=provenance, curves=curves).figure()
        figure.canvas.draw()
        edge = figure.get_window_extent().x1
        assert all(text.get_window_extent().x1 < edge for text in figure.texts)
        assert figure.texts[0].get_text().endswith("may differ by example")

    def test_of_many_phrases_the_worst_are_shown(self):
        phrases = ["good " * n + "a" for n in range(5)] + ["bad " * n + "a" for n in range(1, 5)]
        result = insertion_sweep(fading(WEIGHTS), reviews(), insert=phrases, places=2)
        kept = sorted(result.curves, key=lambda curve: curve.worst.value)[:MAX_SHOWN_PHRASES]
        assert {curve.phrase for curve in result.shown} == {curve.phrase for curve in kept}
        assert [curve.phrase for curve in result.shown] == [c.phrase for c in result.curves if c in kept]
        assert f"{MAX_SHOWN_PHRASES} of 9 phrases" in str(result) and len(result.to_frame()) == 1 + 9 * 3 + 1
        assert "the worst 6 of 9 phrases" in " ".join(labels(result.figure()))
