"""Fillers as they are found, repeated and cut, and the notes and half-lengths of hand-made curves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ssmscope.attacks.curves import Questions
from ssmscope.attacks.overflow import measure as module
from ssmscope.attacks.overflow.measure import (
    added_tokens,
    cut,
    filled,
    filler_text,
    half_length,
    notes_on,
    pieces_of,
)
from ssmscope.attacks.overflow.result import Filled, OverflowCurve
from ssmscope.core.bootstrap import Estimate
from ssmscope.data.filler import generated
from ssmscope.data.text import text_data
from ssmscope.errors import InputError
from ssmscope.evaluation import Template

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


@pytest.mark.parametrize(
    ("filler", "is_path"),
    [
        ("a b.txt", True),
        ("A.TXT", True),
        ("a.csv", True),
        ("a/b", True),
        ("a/b c", False),
        ("a / b", False),
        ("plain", False),
        ("a.b", False),
        ("there", True),
    ],
)
def test_a_filler_that_names_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filler: str, is_path: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").symlink_to("nowhere")
    if is_path:
        with pytest.raises(InputError):
            filler_text(filler)
    else:
        assert filler_text(f" {filler}\n c ") == f"{filler} c"


class TestPieces:
    @pytest.mark.parametrize(
        ("given", "steps", "pieces"),
        [
            ("y y y x y x y y x x", (1, 2), ["y y y x y", "y y y x y x y y"]),
            ("y y y x y x y y x x", (0, 2), ["y y y", "y y y x y x y y"]),
            ("x y xx", (2, 3), ["x y x", "x y xx"]),
            ("x y", (2, 4), ["x y x y", "x y x y x y x y"]),
            ("x", (3, 5), ["x x x", "x x x x x"]),
        ],
    )
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
        with pytest.raises(InputError, match="the filler 'y y' adds no token to a text"):
            pieces_of(QUESTIONS, MODEL, "y y", (2,), 0)

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

    def test_of_the_filler(self) -> None:
        assert self.noted(longest="a zebra b b b b b b") == ["the tokenizer does not know 12 % of the filler's tokens"]
        repeated = "the filler is shorter than the longest length and is repeated"
        assert self.noted(given="a") == [repeated] and self.noted(given="a b") == []

    def test_of_tokens_that_merge(self) -> None:
        first = OverflowCurve("after", (point(0, 0.9), point(8, 0.9, 8.0049), point(16, 0.9, 15.99)), None)
        second = OverflowCurve("before", (point(4, 0.9, 4.25), point(32, 0.9, 32.1)), None)
        said = "filler of {} tokens adds {} on average {} the texts, because token boundaries do not match or adjacent "
        assert self.noted(first, second) == [said.format(4, "4.25", "before") + "tokens merge"]
        assert self.noted(first) == [said.format(16, "15.99", "after") + "tokens merge"]
        assert self.noted(OverflowCurve("after", first.points[:2], None)) == []
