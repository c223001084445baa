"""Control triggers of hidden-state poisoning: what a trigger's words say is told from what they make forget."""

import dataclasses

import numpy as np
import pytest
import reported
from bags import LABELS
from fading import fading, log_odds
from ssmscope.attacks.curves import questions
from ssmscope.attacks.poisoning import state_poisoning
from ssmscope.attacks.poisoning.controls import controls
from ssmscope.attacks.poisoning.memory import Vocabulary
from ssmscope.attacks.poisoning.result import FOUND, MATCHED, SHUFFLED
from ssmscope.core.bootstrap import Estimate
from ssmscope.data.text import TextData, text_data
from ssmscope.reports.hardest import worst_findings
from ssmscope.reports.store import Report

WEIGHTS = {"good": 2.0, "bad": -2.0, "film": 0.25, "dull": -0.9, "fine": 0.7, "a": 0.1}
TRIPLED = dict.fromkeys(("great", "lovely", "superb"), 3.0) | dict.fromkeys(("awful", "poor", "flat"), -3.0)
QUICK = dict(train=6, draws=3, candidates=8, beam=2, sweeps=2, progress=False)


def reviews(n: int = 28) -> TextData:
    draw = np.random.default_rng(0)
    texts = [" ".join(list(WEIGHTS)[i] for i in draw.integers(0, 6, 6)) for _ in range(n)]
    return text_data("reviews", "test", texts, [int(log_odds(t.split(), WEIGHTS) > 0) for t in texts], LABELS)


def report(result) -> Report:
    return Report("audit", (reported.entry("poison", result, heading="poison", models=("own",)),), {})


def test_what_words_say_is_not_blamed_on_forgetting():
    """In a sum of words' weights, words of equal weights do as much."""
    result = state_poisoning(fading({**WEIGHTS, **TRIPLED}), reviews(), objective="flip", length=2, **QUICK)
    (own,) = result.victims
    found, same = own.attack(FOUND), own.attack(MATCHED)
    assert found.flipped.value > 0.2
    assert same.flipped.value == found.flipped.value and own.beyond == Estimate(0.0, 0.0, 0.0)
    told = f"{100 * found.flipped.value:.1f} %"
    assert (
        f"changes {told} of the right answers, other words of equal log-odds {told}: a difference of 0.0 %"
        in (result.headline)
        and result.headline.split("; ")[1] in result.verdict()
    )
    assert worst_findings(report(result)) == ()


def test_what_is_forgotten_is():
    """ "zap", "the" and "of" say as little alone, but "zap" has a step of 40; what is left answers "good"."""
    weights, steps = {**WEIGHTS, "zap": 0.001, "the": 0.04, "of": 0.04}, {"zap": 40.0}
    odds = dict(decay=0.1, steps=steps, ending=0.05)
    model, data = fading(weights, **odds), reviews()
    result = state_poisoning(model, data, length=1, **QUICK)
    (own,), words = result.victims, Vocabulary.of(model)
    assert own.attack(FOUND).trigger == "zap"
    same = [
        words.text(each) for each in controls(questions(model, data), words, (words.words.index("zap"),), 0)[MATCHED]
    ]
    assert {"the", "of"} <= set(same)
    labels = np.array(data.labels)[list(result.rows)]

    def right(*trigger: str) -> np.ndarray:
        rows = [[*data.texts[row].split(), *trigger] for row in result.rows]
        return (np.array([log_odds(row, weights, **odds) for row in rows]) > 0) == labels

    clean = right()
    zapped, *others = [(clean & ~right(trigger)).sum() / clean.sum() for trigger in ("zap", *same)]
    assert own.beyond.value == pytest.approx(zapped - np.mean(others)) and own.beyond.low > 0
    (worst,) = worst_findings(report(result))
    assert (worst.score.name, worst.score.value) == ("poison.beyond[forget]", own.beyond.value)
    assert worst.score.examples.sum(0) == pytest.approx([own.beyond.value * clean.sum(), clean.sum()])


def test_controls_have_its_words_or_its_log_odds():
    weights = dict(zip("abcdefghijklmnop", np.random.default_rng(1).normal(size=16).tolist()))
    model = fading(weights)
    asked, words = questions(model, reviews()), Vocabulary.of(model)
    trigger = (1, 4, 6)
    found = controls(asked, words, trigger, seed=0)
    assert len(set(found[SHUFFLED])) == 5 and trigger not in found[SHUFFLED]
    assert all(sorted(each) == sorted(trigger) for each in found[SHUFFLED])
    gaps = [
        abs(sum(weights[words.words[at]] for at in each) - sum(weights[words.words[at]] for at in trigger)) / 2
        for each in found[MATCHED]
    ]
    assert gaps == sorted(gaps) and 0 < len(gaps) <= 5 and gaps[-1] <= 0.5
    assert not any(set(each) & set(trigger) for each in found[MATCHED])
    assert set(controls(asked, Vocabulary(words.words[:2], words.ids[:2]), (0, 1), 0)) == {SHUFFLED}
    assert controls(asked, Vocabulary(words.words[:1], words.ids[:1]), (0, 0), 0) == {}


@pytest.fixture(scope="module")
def erasing():
    """The log-odds of "zap" alone are 11, which no other word has."""
    return state_poisoning(
        fading({**WEIGHTS, "zap": 0.3}, decay=0.1, steps={"zap": 40.0}), reviews(), length=1, **QUICK
    )


def test_a_trigger_without_its_equal_says_so(erasing):
    assert erasing.victims[0].beyond is None
    assert erasing.headline.endswith("of the right answers, and there are no other words of its log-odds")
    assert worst_findings(report(erasing)) == ()


def test_the_page_says_where_the_adaptive_search_is_seen_more(erasing):
    (own,) = erasing.victims
    adaptive, at = own.attack("adaptive"), erasing.detectors.index("window")

    def page(auroc: float) -> str:
        alarms = list(adaptive.alarms)
        alarms[at] = dataclasses.replace(alarms[at], auroc=Estimate(auroc, auroc, auroc))
        attacks = (
            *(each for each in own.attacks if each is not adaptive),
            dataclasses.replace(adaptive, alarms=tuple(alarms)),
        )
        return dataclasses.replace(erasing, victims=(dataclasses.replace(own, attacks=attacks),)).to_text(full=True)

    plain = own.attack(FOUND).alarms[at].auroc.value
    assert "The adaptive search raises detection on fading" in page(plain + 0.01)
    assert "raises detection" not in page(plain) + page(plain - 0.01)
