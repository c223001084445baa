"""The rules of verdicts on comparisons: their rates of error, and slow references."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from verdicts import Question, Verdict, against, smallest_seen, table, verdicts  # noqa: E402

STUDIES = 2000


def words(
    shift: float, *, runs: int = 6, sd: float = 1.0, margin: float = 1.0, paper: float | None = None
) -> list[str]:
    """The verdicts of simulated studies of one question, whose true difference is `shift`."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(STUDIES):
        arms = [(rng.normal(shift, 1, runs), rng.normal(0, 2, runs))]
        found += [each.words for each in verdicts({Question("q", margin, paper): arms})]
    return found


def test_a_single_question_is_welchs_test():
    rng = np.random.default_rng(1)
    one, other = rng.normal(0.3, 1, 9), rng.normal(0, 2, 7)
    (found,) = verdicts({Question("q", 0.01): [(one, other)]})
    theirs = stats.ttest_ind(one, other, equal_var=False)
    assert found.estimate == pytest.approx(one.mean() - other.mean()) and found.runs == (9, 7)
    assert found.interval == pytest.approx(tuple(theirs.confidence_interval(0.95)))


def test_errors_are_as_rare_as_promised():
    none = words(0.0, margin=0.01)
    assert none.count("different") <= 0.05 * STUDIES * 1.2 and none.count("equivalent within 0.01") == 0
    # A true difference of just the margin, with runs enough to tell.
    edge, well = words(4.0, runs=20, margin=4.0), words(0.0, runs=20, margin=4.0)
    assert edge.count("equivalent within 4") <= 0.05 * STUDIES and well.count("equivalent within 4") > 0.9 * STUDIES
    excluded = words(2.0, margin=0.01, paper=2.0)
    assert excluded.count("the paper's effect is excluded") <= 0.05 * STUDIES


def test_power_is_as_printed():
    for runs in (5, 12):
        error = np.sqrt((1 + 4) / runs)
        freedom = (1 + 4) ** 2 / ((1 + 16) / (runs - 1))
        shift = smallest_seen(error, freedom)
        assert words(shift, runs=runs, margin=1e-9).count("different") / STUDIES == pytest.approx(0.8, abs=0.05)


def test_a_family_has_the_error_rate_of_one_question():
    rng = np.random.default_rng(2)
    wrong = 0
    for _ in range(STUDIES):
        family = {Question(f"q{i}", 1e-9): [(rng.normal(0, 1, 5), rng.normal(0, 1, 5))] for i in range(6)}
        wrong += any(each.words == "different" for each in verdicts(family))
    assert wrong <= 0.05 * STUDIES * 1.2


def test_a_family_is_seldom_called_equivalent_that_is_not():
    """Seven questions, each with a true difference of just the margin and runs enough to be significant: the levels of
    Holm's later steps would let 7 % of these families through."""
    rng = np.random.default_rng(4)
    wrong = 0
    for _ in range(STUDIES):
        one, other = rng.normal(1, 0.25, (7, 12)), rng.normal(0, 0.25, (7, 12))
        family = {Question(f"q{i}", 1.0): [(one[i], other[i])] for i in range(7)}
        wrong += any(each.words == "equivalent within 1" for each in verdicts(family))
    assert wrong <= 0.05 * STUDIES


def test_a_family_seldom_excludes_the_papers_effect_that_is_true():
    rng = np.random.default_rng(5)
    wrong = 0
    for _ in range(STUDIES):
        one, other = rng.normal(0.5, 1, (4, 6)), rng.normal(0, 2, (4, 6))
        family = {Question(f"q{i}", 1e-9, paper=0.5): [(one[i], other[i])] for i in range(4)}
        wrong += any(each.words == "the paper's effect is excluded" for each in verdicts(family))
    assert wrong <= 0.05 * STUDIES * 1.2


def test_pooled_data_sets_keep_error_and_power():
    """Two data sets of different spread, each with the same true difference: none, or the smallest to be seen."""
    rng, error = np.random.default_rng(6), np.sqrt((1 + 4 + 0.25 + 1) / 8) / 2
    parts = np.array([1, 4, 0.25, 1]) / 8 / 4
    seen = smallest_seen(error, parts.sum() ** 2 / (parts**2 / 7).sum())
    for shift, rate, within in ((0.0, 0.05, 0.015), (seen, 0.8, 0.05)):
        different = 0
        for _ in range(STUDIES):
            arms = [(rng.normal(shift, sd, 8), rng.normal(0, 2 * sd, 8)) for sd in (1.0, 0.5)]
            different += verdicts({Question("q", 1e-9): arms})[0].words == "different"
        assert different / STUDIES == pytest.approx(rate, abs=within)


def test_arms_against_one_base_are_a_family():
    same, more = [1.0, 1.1, 0.9, 1.0, 1.05], [2.0, 2.1, 1.9, 2.0, 2.05]
    rows = against([same, more], {"as it": [same, more], "more": [more, more]}, 0.1, {"more": 0.3}, digits=1)
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| as it", "| more"]
    assert rows[3].startswith("| more | 5, 5 | +0.5 [+0.4, +0.6] |") and rows[3].endswith("| +0.3 | **different** |")


def test_holm_steps_down():
    """p of .012, .02 and .3: .012 ≤ .05 / 3, .02 ≤ .05 / 2, .3 > .05; Bonferroni's .05 / 3 would miss the second."""

    def arms(p: float) -> list:
        x = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
        error = np.sqrt(2 * x.var(ddof=1) / 5)
        return [(x + stats.t.isf(p / 2, 8) * error, x)]

    family = {Question(str(p), 1e-9): arms(p) for p in (0.3, 0.012, 0.02)}
    assert [each.words for each in verdicts(family)] == ["undecided", "different", "different"]


def test_data_sets_are_pooled_with_equal_weight():
    rng = np.random.default_rng(3)
    arms = [(rng.normal(1, 1, 40), rng.normal(0, 1, 5)), (rng.normal(3, 1, 5), rng.normal(0, 1, 6))]
    (found,) = verdicts({Question("q", 0.1): arms})
    each = [np.mean(one) - np.mean(other) for one, other in arms]
    assert found.estimate == pytest.approx(np.mean(each)) and found.runs == (5, 5)
    alone = [verdicts({Question("q", 0.1): [both]})[0] for both in arms]
    assert found.seen < max(one.seen for one in alone)


def test_words():
    q = Question("q", 0.5, paper=3.0)
    same = [1.0, 1.1, 0.9, 1.0, 1.05]
    wide = [0.0, 2.0, -1.0, 1.5, 2.4]

    def told(question: Question, one: list[float], other: list[float]) -> str:
        return verdicts({question: [(one, other)]})[0].words

    assert told(q, same, same) == "equivalent within 0.5" and told(q, [x + 2 for x in same], same) == "different"
    assert told(q, wide, same) == "the paper's effect is excluded"
    assert told(Question("q", 0.5), wide, same) == "undecided"
    assert told(q, same[:4], same) == "a case"
    assert told(Question("q", 0.5), [1.0] * 5, [1.0] * 5) == "equivalent within 0.5"


def test_the_table_says_all():
    found = Verdict(Question("a or b", 0.05, 0.19), (18, 17), 0.046, (-0.027, 0.119), "undecided", 0.036, 31.0)
    head, _, row = table([found])
    assert head == "| question | runs | difference | could have seen | the paper's | verdict, margin 0.05 |"
    assert row == "| a or b | 18, 17 | +0.046 [−0.027, +0.119] | 0.104 | +0.190 | **undecided** |"
    other = replace(found, question=Question("c", 2, None))
    assert table([other])[0].endswith("| could have seen | verdict, margin 2 |")
    assert table([found, other])[3].endswith("| 0.104 | 2 | – | **undecided** |")
