"""State overflow on models that forget at a known rate, against slow references, and as its users meet it. Fillers as
they are found, repeated and cut, and the notes and half-lengths of hand-made curves."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bags import LABELS
from fading import fading, log_odds
from refusals import refuses
from transformers import MambaConfig, MambaForCausalLM
import ssmscope
from ssmscope.attacks.curves import Questions
from ssmscope.attacks.overflow import measure as module
from ssmscope.attacks.overflow import state_overflow
from ssmscope.attacks.overflow.measure import (
    added_tokens,
    cut,
    filled,
    filler_text,
    half_length,
    measure,
    notes_on,
    pieces_of,
)
from ssmscope.attacks.overflow.result import Filled, OverflowCurve, half_name
from ssmscope.core.bootstrap import Estimate
from ssmscope.data.filler import generated
from ssmscope.data.text import TextData, text_data
from ssmscope.errors import InputError
from ssmscope.evaluation import Template
from ssmscope.zoo.documents import byte_tokenizer, word_tokenizer
from ssmscope.zoo.tokenizers import train_tokenizer

DECAY, BIAS = 0.1, 0.3
WEIGHTS = {"good": 2.0, "bad": -2.0, "great": 4.0, "awful": -1.0, "a": 0.0, "b": 0.0, "Is": 0.0, "it": 0.0, "?": 0.0}


def reviews() -> TextData:
    """Texts whose class the model gets right; two of three are of class "good", which is chance."""
    texts = ["a good", "b great", "great a", "good b", "a bad b", "b b awful"] * 4
    return text_data("reviews", "test", texts, [1, 1, 1, 1, 0, 0] * 4, LABELS)


def expected(words: list[str], n: int, bias: float | None = BIAS) -> float:
    """Return the log-odds of "good" after n tokens of filler without weight."""
    behind = log_odds(words, WEIGHTS, decay=DECAY, ending=None) * math.exp(-DECAY * n)
    return behind if bias is None else math.exp(-DECAY) * behind + bias


class TestClosedForm:
    def test_what_is_forgotten_and_when(self):
        """Evidence decays by e^(−λn), and the answer falls to the class of the bias: "awful" at n = 12, "bad" at 18."""
        model, data, lengths = fading(WEIGHTS, decay=DECAY, ending=BIAS), reviews(), (1, 8, 12, 16, 18, 40)
        found = state_overflow(model, data, filler="a b b", lengths=lengths)
        after, before = found.curves
        assert (after.where, before.where) == ("after", "before") and found.chance == 2 / 3
        assert found.clean.value == 1 and [p.tokens for p in after.points] == [0, *lengths]
        for point in after.points:
            odds = np.array([expected(text.split(), point.tokens) for text in data.texts])
            answers = (odds > 0).astype(int)
            odds = np.where(np.array(data.labels) == 1, odds, -odds)
            assert point.added == point.tokens and point.log_odds.value == pytest.approx(odds.mean(), abs=1e-4)
            assert point.accuracy.value == (odds > 0).mean()
            assert point.drop.value == pytest.approx(1 - point.accuracy.value)
            shares = [(answers == 0).mean(), (answers == 1).mean()]
            assert [share.value for share in point.shares] == pytest.approx(shares)
            assert point.majority.value == pytest.approx(max(shares))
            assert point.majority == point.shares[int(np.argmax(shares))]
            assert point.entropy.value == pytest.approx(-sum(p * math.log2(p) for p in shares if p))
        assert [p.accuracy.value for p in after.points] == pytest.approx([1, 1, 1, 5 / 6, 5 / 6, 2 / 3, 2 / 3])
        assert after.half_length.value == 12 and half_name(after).startswith("at 12 tokens [")
        for point, clean in zip(before.points, [after.points[0]] * 7):
            assert point.accuracy == clean.accuracy and point.shares == clean.shares
            assert point.log_odds.value == pytest.approx(clean.log_odds.value, abs=1e-5)
        assert before.half_length is None and half_name(before) == "never within 40 tokens"
        assert [gap.value for gap in found.gaps] == pytest.approx([0, 0, 0, 1 / 6, 1 / 6, 1 / 3, 1 / 3])
        assert found.notes == ("the filler is shorter than the longest length and is repeated",)

    def test_of_a_language_model_filler_stands_within_the_template(self):
        """Text after {content} also follows the filler, and text before it precedes both."""
        weights = {**WEIGHTS, "Is": 1.5, "?": -0.25}
        model, data = fading(weights, decay=DECAY, language=True), reviews()
        prompt = dict(template="Is it {content} ?", words=["bad", "good"])
        found = state_overflow(model, data, filler="a b", lengths=[2, 5], **prompt)
        filler = ["a", "b", "a", "b", "a"]
        for curve in found.curves:
            for point in curve.points:
                piece = filler[: point.tokens]
                rows = []
                for text, label in zip(data.texts, data.labels):
                    words = [*text.split(), *piece] if curve.where == "after" else [*piece, *text.split()]
                    odds = log_odds(["Is", "it", *words, "?"], weights, decay=DECAY, ending=None)
                    rows.append(odds if label else -odds)
                assert point.log_odds.value == pytest.approx(np.mean(rows), abs=1e-4)
                assert point.accuracy.value == (np.array(rows) > 0).mean()
        assert found.filler == "a b a b a"

    def test_one_place_alone_is_the_same_curve(self):
        model, data = fading(WEIGHTS, decay=DECAY, ending=BIAS), reviews()
        both = state_overflow(model, data, filler="a", lengths=[4, 12])
        for number, where in enumerate(("after", "before")):
            one = state_overflow(model, data, filler="a", lengths=[12, 4, 0], where=where)
            assert one.curves == (both.curves[number],) and one.gaps == ()
            assert len(one.figure().axes) == 3 and "before less after" not in str(one)


def tokens(model, text: str) -> int:
    return len(model.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else 0


class TestFiller:
    LINES = ("the quick brown foxes were jumping over lazily sleeping dogs near the riverbank .",) * 3

    @pytest.mark.parametrize("kind", ["bytes", "words", "subwords"])
    def test_is_cut_at_tokens(self, kind):
        tokenizer = {
            "bytes": byte_tokenizer,
            "words": lambda: word_tokenizer(self.LINES),
            "subwords": lambda: train_tokenizer(["a b", *self.LINES], vocabulary=60),
        }[kind]()

        def count(text: str) -> int:
            return len(tokenizer(f"a {text}")["input_ids"]) - len(tokenizer("a")["input_ids"]) if text else 0

        text = self.LINES[0]
        longest = count(text)
        pieces = [cut(text, n, count) for n in range(longest + 1)]
        assert pieces[0] == "" and pieces[-1] == text
        for n, piece in enumerate(pieces):
            assert text.startswith(piece) and count(piece) <= n
            counts = [count(text[:end]) for end in range(len(text) + 1) if text[end - 1 : end] != " "]
            assert count(piece) == max(found for found in counts if found <= n)
            words = [end for end in (*range(len(text)), len(text)) if text[end : end + 1] in (" ", "") or not end]
            fitting = [text[:end] for end in words if count(text[:end]) == n]
            assert not fitting or piece == fitting[-1]  # whole words where they fit

    def test_of_a_known_text(self, real_data, monkeypatch):
        real_data("wikitext2", "test")
        found = state_overflow(fading(WEIGHTS), reviews(), filler="wikitext2", lengths=[12])
        assert len(found.filler.split()) >= 8 and "=" not in found.filler

    def test_what_is_added_is_counted(self):
        """Bytes join with nothing, but a character of three of them is not cut."""
        torch.manual_seed(0)
        config = MambaConfig(vocab_size=256, hidden_size=8, num_hidden_layers=1, state_size=4)
        model = ssmscope.Model(MambaForCausalLM(config).eval(), byte_tokenizer(), "bytes")
        data = text_data("d", "all", ["one two", "three"], [1, 0], LABELS)
        prompt = dict(template="{content}:", words=["b", "g"])
        found = state_overflow(model, data, filler="電影 電影", lengths=[1, 4, 5, 7], **prompt)
        assert [point.added for point in found.curves[0].points] == [0, 0, 4, 4, 7]
        assert any("filler of 1 tokens adds 0.00 on average after the texts" in note for note in found.notes)


class TestMeasure:
    def test_against_loops(self):
        draw = np.random.default_rng(0)
        labels, answers = draw.integers(0, 3, 60), draw.integers(0, 3, (2, 4, 60))
        answers[1, 0] = answers[0, 0]
        odds = draw.normal(size=(2, 4, 60))
        added = draw.normal(size=(2, 4))
        fields = measure(labels, answers, odds, ("after", "before"), (0, 1, 2, 3), added, 3, seed=0)
        found = SimpleNamespace(**fields)
        assert found.chance == max((labels == c).mean() for c in range(3))
        for place in range(2):
            for at in range(4):
                one, given = found.curves[place].points[at], answers[place, at]
                assert (one.tokens, one.added) == (at, added[place, at])
                accuracy = (given == labels).mean()
                shares = [(given == c).mean() for c in range(3)]
                assert one.accuracy.value == pytest.approx(accuracy)
                assert one.drop.value == pytest.approx(1 - accuracy / found.clean.value)
                assert one.log_odds.value == pytest.approx(odds[place, at].mean())
                assert [share.value for share in one.shares] == pytest.approx(shares)
                assert one.majority.value == pytest.approx(max(shares))
                assert one.entropy.value == pytest.approx(-sum(p * math.log2(p) for p in shares))
                assert one.accuracy.low < accuracy < one.accuracy.high
        gaps = [(answers[1, at] == labels).mean() - (answers[0, at] == labels).mean() for at in range(4)]
        assert [gap.value for gap in found.gaps] == pytest.approx(gaps) and found.gaps[0] == Estimate(0, 0, 0)

    def test_intervals_are_paired(self):
        """For nested hits the gap between the places varies by the few examples between."""
        hits = np.arange(400)[None, None] < np.array([[[390], [290]], [[390], [300]]])
        nothing = np.zeros((2, 2, 400))
        given = (np.ones(400, dtype=int), hits.astype(int), nothing, ("after", "before"), (0, 1), nothing[..., 0], 2)
        gap = measure(*given, seed=0)["gaps"][1]
        assert gap.value == pytest.approx(0.025) and 0.009 < gap.low < gap.high < 0.045


class TestOptions:
    @pytest.mark.parametrize(("options", "says"), [
        (dict(where="befor"), "unknown where 'befor'; allowed are after, before, both; did you mean 'before'"),
        (dict(lengths=[0]), "lengths has only 0"),
        (dict(filler=" "), "the filler is empty"),
        (dict(filler=[1]), "filler is .1.; allowed is a text"),
        (dict(template="no place"), "has no {content}"),
    ])  # fmt: skip
    def test_what_is_refused(self, options, says):
        refuses(says, state_overflow, fading(WEIGHTS), reviews(), **options)

    def test_a_cache_and_a_limit_change_no_number(self, tmp_path):
        model, data = fading(WEIGHTS, decay=DECAY, ending=BIAS), reviews()
        first = state_overflow(model, data, lengths=[4, 30], limit=10, seed=2, cache=tmp_path / "cache")
        again = state_overflow(model, data, lengths=[4, 30], limit=10, seed=2, cache=tmp_path / "cache")
        assert first.curves == again.curves and first.clean == again.clean
        assert first.provenance["data"]["fingerprint"] == data.sample(10, seed=2).fingerprint


class TestResult:
    @pytest.fixture
    def result(self):
        return state_overflow(fading(WEIGHTS, decay=DECAY, ending=BIAS), reviews(), filler="a", lengths=[8, 16, 64])

    @pytest.mark.parametrize("lengths", [(16, 32, 64, 128, 256, 512), (1, 500, 501, 510, 512), (100,), range(1, 60)])
    def test_lengths_under_the_axis_do_not_touch(self, result, lengths):
        point = result.curves[0].points[1]
        points = tuple(dataclasses.replace(point, tokens=n) for n in (0, *lengths))
        figure = dataclasses.replace(result, curves=(OverflowCurve("after", points, None),)).figure()
        figure.canvas.draw()
        labels = [label.get_window_extent() for label in figure.axes[-1].get_xticklabels() if label.get_text()]
        assert all(a.x1 < b.x0 for a, b in zip(labels, labels[1:])) and len(labels) >= 2
        assert labels[-1].x1 < figure.get_window_extent().x1


DATA = text_data("own", "test", ["x y", "z"], [0, 1], ("a", "b"))
QUESTIONS = Questions(DATA, DATA.texts, DATA.labels, DATA.label_names, Template("B: {content} :A"), None)  # type: ignore[arg-type]
MODEL: Any = SimpleNamespace(tokenizer=None)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A tokenizer that knows the letter x alone; the texts that it was given."""
    seen: list[str] = []

    def tokens(model: Any, texts: list[str]) -> np.ndarray:
        seen.extend(texts)
        return np.array([text.count("x") for text in texts])

    monkeypatch.setattr(module, "_tokens", tokens)
    return seen


@pytest.mark.parametrize(("filler", "is_path"), [
    ("a b.txt", True), ("A.TXT", True), ("a.csv", True), ("a/b", True), ("a/b c", False), ("a / b", False),
    ("plain", False), ("a.b", False), ("there", True),
])  # fmt: skip
def test_a_filler_that_names_a_file(tmp_path, monkeypatch, filler, is_path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").symlink_to("nowhere")
    if is_path:
        with pytest.raises(InputError):
            filler_text(filler)
    else:
        assert filler_text(f" {filler}\n c ") == f"{filler} c"


class TestPieces:
    @pytest.mark.parametrize(("given", "steps", "pieces"), [
        ("y y y x y x y y x x", (1, 2), ["y y y x y", "y y y x y x y y"]),
        ("y y y x y x y y x x", (0, 2), ["y y y", "y y y x y x y y"]),
        ("x y xx", (2, 3), ["x y x", "x y xx"]),
        ("x y", (2, 4), ["x y x y", "x y x y x y x y"]),
        ("x", (3, 5), ["x x x", "x x x x x"]),
    ])  # fmt: skip
    def test_a_given_filler_is_repeated_and_cut(self, counted: list[str], given, steps, pieces) -> None:
        assert pieces_of(QUESTIONS, MODEL, given, steps, 0) == pieces
        assert all(text.startswith("B: x y") and text.endswith(" :A") for text in counted)

    def test_a_long_filler_is_tokenized_as_far_as_needed(self, counted: list[str]) -> None:
        assert pieces_of(QUESTIONS, MODEL, "x " * 1000, (0, 3), 0) == ["", "x x x"]
        assert max(map(len, counted)) < 30

    def test_sentences_are_generated_by_the_seed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_tokens", lambda model, texts: np.array([len(text.split()) for text in texts]))
        for seed in (3, 4):
            draw = np.random.default_rng(seed)
            whole = " ".join(each for _ in range(7) for each in generated(draw, 64, spaced=False)).split()
            assert pieces_of(QUESTIONS, MODEL, None, (5, 1500), seed) == [" ".join(whole[:5]), " ".join(whole[:1500])]
            assert len(whole) > 1500

    def test_a_filler_without_a_token_is_refused(self, counted: list[str]) -> None:
        refuses("the filler 'y y' adds no token to a text", pieces_of, QUESTIONS, MODEL, "y y", (2,), 0)

    def test_a_cut_within_a_word(self) -> None:
        """A longer part of the word can have fewer tokens than a shorter one."""

        def count(text: str) -> int:
            return text.count(" ") + 2 * text.count("x") - 3 * text.count("xy")

        assert cut("a xxyxxz b", 1, count) == "a" and cut("a xxyxxz b", 2, count) == "a xxy"
        assert cut("a b", 9, count) == "a b" and cut("a b", 0, count) == "a"
        assert cut("xx", 1, lambda text: 2 * len(text)) == ""

    def test_texts_have_the_filler_within_their_template(self) -> None:
        assert filled(QUESTIONS, "after", "f g") == ["B: x y f g :A", "B: z f g :A"]
        assert filled(QUESTIONS, "before", "f g") == ["B: f g x y :A", "B: f g z :A"]
        assert filled(QUESTIONS, "before", "") == filled(QUESTIONS, "after", "") == ["B: x y :A", "B: z :A"]

    def test_added_tokens_are_means_over_the_texts(self, counted: list[str]) -> None:
        texts = ["x", "", "xx", "xxx", "xxxx", "x", "x", "xx", "", "x", "xxx", "xxx"]
        found = added_tokens(MODEL, texts, (2, 3))
        assert found.tolist() == [[0, 2, 2], [0, -1, 1.5]] and counted == texts


class TestHalfLength:
    def test_half_is_exact_despite_rounding(self) -> None:
        rows = np.array([[0.8, 0.55, 0.3]] * 3)
        assert 0.55 - 0.3 > (0.8 - 0.3) / 2
        assert half_length(rows, np.full(3, 0.3), (0, 8, 32)) == Estimate(8, 8, 8)
        assert half_length(np.array([[0.5, 0.4, 0.3]] * 3), np.full(3, 0.5), (0, 8, 32)) is None

    def test_the_interval_is_of_95_percent_of_the_resamples_above_chance(self) -> None:
        """Row r loses half at length r; the first rows after the estimate's are at chance."""
        above = np.arange(90) < np.arange(-10, 81)[:, None]
        rows = np.concatenate([np.full((1, 90), 0.9), np.where(above, 0.9, 0.5)])
        rows[0, 40:] = 0.6
        found = half_length(rows[:, :81], np.full(len(rows), 0.5), tuple(range(81)))
        assert found == Estimate(40, 2, 78)


def point(tokens: int, accuracy: float, added: float | None = None) -> Filled:
    one = Estimate(accuracy, accuracy - 0.05, accuracy + 0.05)
    rest: Any = dict(log_odds=one, shares=(one,), majority=one, entropy=one, accuracy=one, drop=one)
    return Filled(tokens, float(tokens if added is None else added), **rest)


class TestNotes:
    @pytest.fixture(autouse=True)
    def known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            module, "unknown_tokens", lambda model, text: (len(text.split()), text.split().count("zebra"))
        )

    def noted(
        self, *curves: OverflowCurve, longest: str = "a b", given: str | None = None, low: float = 0.6
    ) -> list[str]:
        clean = Estimate(0.9, low, 1.0)
        return list(notes_on(MODEL, given, longest, clean, 0.5, curves))

    def test_of_an_accuracy_near_chance(self) -> None:
        assert self.noted(low=0.51) == []
        (note,) = self.noted(low=0.5)
        assert note.startswith("the clean accuracy, 0.900") and note.endswith(
            "above chance, 0.500: there is little to forget"
        )

    def test_of_an_accuracy_that_comes_back(self) -> None:
        lost = Estimate(8.0, 8.0, 8.0)
        points = (point(0, 0.9), point(8, 0.8), point(16, 0.7), point(1024, 0.71), point(2048, 0.8))
        assert self.noted(OverflowCurve("after", points, None)) == []
        assert self.noted(OverflowCurve("after", points[:3], lost)) == []
        both = OverflowCurve("before", points, lost), OverflowCurve("after", points[:2], lost)
        assert self.noted(*both) == ["with filler before the text, accuracy is above half again at 1,024 tokens"]

    def test_of_the_filler_and_of_tokens_that_merge(self) -> None:
        assert self.noted(longest="a zebra b b b b b b") == ["the tokenizer does not know 12 % of the filler's tokens"]
        repeated = "the filler is shorter than the longest length and is repeated"
        assert self.noted(given="a") == [repeated] and self.noted(given="a b") == []
        first = OverflowCurve("after", (point(0, 0.9), point(8, 0.9, 8.0049), point(16, 0.9, 15.99)), None)
        second = OverflowCurve("before", (point(4, 0.9, 4.25), point(32, 0.9, 32.1)), None)
        said = "filler of {} tokens adds {} on average {} the texts, because token boundaries do not match or adjacent "
        assert self.noted(first, second) == [said.format(4, "4.25", "before") + "tokens merge"]
        assert self.noted(first) == [said.format(16, "15.99", "after") + "tokens merge"]
        assert self.noted(OverflowCurve("after", first.points[:2], None)) == []
