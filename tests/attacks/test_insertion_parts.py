"""Numbers of an insertion sweep against loops, its counts and its notes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bags import LABELS
from fading import fading
from refusals import refuses
from ssmscope.attacks.insertion import checked_phrases, checked_shares, insertion_sweep
from ssmscope.attacks.insertion import measure as module
from ssmscope.attacks.insertion.measure import attacked_texts, measure, notes_on
from ssmscope.core import batching
from ssmscope.core.bootstrap import Estimate
from ssmscope.data.text import text_data
from ssmscope.render.tokens import shorten, visible

SPOTS = [("first", None), ("0 %", 0.0), ("50 %", 0.5), ("100 %", 1.0)]


class Stopped(Exception):
    """Exception that carries the arguments of a call."""


@pytest.mark.parametrize("with_odds", [True, False])
def test_every_number_is_that_of_a_loop(with_odds: bool) -> None:
    draw = np.random.default_rng(1)
    labels, answers = draw.integers(0, 3, 50), draw.integers(0, 3, (5, 50))
    answers[draw.random((5, 50)) < 0.5] = -1  # answers that name no class
    answers = np.where(draw.random((5, 50)) < 0.6, labels, answers)
    odds = draw.integers(-2, 3, (5, 50)).astype(float)  # several places are often the worst
    found = measure("a b", SPOTS, answers, labels, odds if with_odds else None, 0)
    right = answers == labels
    assert (found.phrase, [(each.name, each.share) for each in found.places]) == ("a b", SPOTS)
    for at, place in enumerate(found.places, 1):
        assert place.accuracy.value == pytest.approx(right[at].mean())
        assert place.drop.value == pytest.approx(1 - right[at].sum() / right[0].sum())
        changed = sum(right[0, i] and answers[at, i] != answers[0, i] for i in range(50))
        assert place.flipped.value == pytest.approx(changed / right[0].sum())
        if not with_odds:
            assert place.log_odds_change is None and place.worst_here is None
            continue
        assert place.log_odds_change.value == pytest.approx(np.mean(odds[at] - odds[0]))
        shares = [(odds[at, i] == odds[1:, i].min()) / np.sum(odds[1:, i] == odds[1:, i].min()) for i in range(50)]
        assert place.worst_here.value == pytest.approx(np.mean(shares))
    everywhere = right[1:].all(0)
    assert found.worst.value == pytest.approx(everywhere.mean()) and everywhere.any()
    assert found.worst_drop.value == pytest.approx(1 - everywhere.sum() / right[0].sum())
    assert found.worst.low < found.worst.value < found.worst.high
    assert found.hardest_places[0] == int(np.argmin(right[1:].sum(1)))
    assert len(found.lowest_odds) == 0 if not with_odds else found.lowest_odds


def test_texts_with_a_phrase_at_every_place() -> None:
    asked: Any = SimpleNamespace(before="Q: ", after=" ?", contents=("a b c", "d"))
    spots = [(module.FIRST, None), ("0 %", 0.0), ("49 %", 0.49), ("50 %", 0.5), ("after the template", None)]
    assert list(attacked_texts(asked, "x y", spots)) == [
        *("x y Q: a b c ?", "x y Q: d ?", "Q: x y a b c ?", "Q: x y d ?", "Q: a x y b c ?", "Q: x y d ?"),
        *("Q: a b x y c ?", "Q: d x y ?", "Q: a b c ? x y", "Q: d ? x y"),
    ]
    asked.after = "?\n"
    assert list(attacked_texts(asked, "x", spots[-1:])) == ["Q: a b c?\nx", "Q: d?\nx"]


def test_all_texts_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: Any, **more: Any) -> None:
        raise Stopped(given, more)

    monkeypatch.setattr(batching, "refuse_held", stop)
    data = text_data("own", "all", ["a b", "b", "a a"], [0, 1, 0], LABELS)
    for options, spots in (({}, 4), ({"template": "b {content} ", "words": ["bad", "good"]}, 5)):
        model = fading({"a": 1.0, "b": -1.0, "good": 0.1, "bad": 0.2}, language=bool(options))
        with pytest.raises(Stopped) as caught:
            insertion_sweep(model, data, insert=["a", "b a"], places=4, **options)
        (number, what, advice), more = caught.value.args
        assert number == 3 * (1 + 2 * spots) and what == "2 phrases at 4 places of 3 texts"
        assert (advice, more) == ("give fewer places, or a limit", {"most": 10**7, "unit": "texts"})


def test_phrases_and_places_as_they_are_given() -> None:
    assert checked_phrases(" a b ") == ("a b",) and checked_phrases([" a", "b "]) == ("a", "b")
    assert (
        checked_shares(2) == (0, 1)
        and checked_shares(5) == (0, 0.25, 0.5, 0.75, 1)
        and len(checked_shares(10_000)) == 10_000
    )
    assert checked_shares([1, 0.25, 0]) == (0, 0.25, 1)
    for places, said in (
        (10_001, "places is 10,001; allowed are up to 10,000"), (1, "places is 1; allowed"),
        ([0.5, True], "places has True"), ([0.5, "1"], "places has '1'"), ([1.01], "places has 1.01"),
        ([-0.01], "places has -0.01"), ([0.5, 0.25, 0.5], "places names 0.5 twice"),
    ):  # fmt: skip
        refuses(said, checked_shares, places)
    for phrases, said in (([], "nothing was given"), (["a", " "], "' ' was given"), (["a", 3], "3 was given")):
        refuses(said, checked_phrases, phrases)
    refuses("the phrase 'b' is given twice", checked_phrases, ["a", "b", " b"])


def test_notes_on_answers_and_phrases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "unknown_tokens", lambda model, text: (len(text.split()), text.count("zebra")))
    answers = np.array([[0, -1, 1], [1, -1, -1]])
    phrases = ["a zebra b", "a b", "zebra " * 9]
    assert list(notes_on(None, phrases, answers, Estimate(0.0, 0.0, 0.0))) == [  # type: ignore[arg-type]
        "the clean accuracy is 0: there is no drop to measure",
        "50.0 % of the generated answers name no class and count as wrong",
        "the tokenizer does not know 1 of the 3 tokens of “a zebra b”",
        f"the tokenizer does not know 9 of the 9 tokens of “{shorten(visible('zebra ' * 9), 40)}”",
    ]
    assert list(notes_on(None, phrases[1:2], answers[:, :1], Estimate(0.5, 0, 1))) == []  # type: ignore[arg-type]
