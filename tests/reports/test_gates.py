"""Gates: each state by its bound, the correction for their number, the scores that are read, and what is refused."""

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from planned import planned
from refusals import refused, refuses
from reported import entry, failed
from scipy.stats import binom
from ssmscope.api.scores import Score
from ssmscope.core.bootstrap import Estimate, estimate, resampled_sums, wilson_interval
from ssmscope.errors import InputError
from ssmscope.interp.fidelity.measures import LOGIT_SCALE
from ssmscope.reports import gates as module
from ssmscope.reports.gates import check, decide, examples_needed, report_gates, state_of
from ssmscope.reports.requirements import read_requirement
from ssmscope.reports.store import LEFT_OUT, Report

NAN = math.nan


def score(value, model="a", *, name="accuracy", low=NAN, high=NAN, better="higher", examples=None, ids="") -> Score:
    return Score(name, model, value, low, high, 100, better, "", examples, ids)


def plan(*models, **options):
    return planned({"models": list(models), "analyses": [{"evaluate": options}]})


def shares(right: int, model="a", *, of=100, ids="same") -> Score:
    examples = np.stack([np.arange(of) < right, np.ones(of)], axis=1).astype(float)
    return replace(score(right / of, model, examples=examples, ids=ids), unit="share")


def states(texts, scores, baseline=()):
    return [gate.state for gate in decide(list(map(read_requirement, texts)), scores, baseline)]


@pytest.mark.parametrize(("operator", "limit", "state"), [
    *[("<=", limit, state) for limit, state in [(0.3, "met"), (0.29, "undecided"), (0.1, "undecided")]],
    *[("<=", limit, state) for limit, state in [(0.2, "undecided"), (0.0999, "missed")]],
    *[(">=", limit, state) for limit, state in [(0.1, "met"), (0.11, "undecided"), (0.3, "undecided")]],
    *[(">=", limit, state) for limit, state in [(0.31, "missed")]],
    *[("<", 0.3, "undecided"), ("<", 0.1, "missed"), (">", 0.1, "undecided"), (">", 0.3, "missed")],
])  # fmt: skip
def test_bounds_decide(operator, limit, state):
    found = Estimate(0.2, 0.1, 0.3)
    assert state_of(found, operator, limit, with_bounds=True)[0] == state
    estimate = {"<=": 0.2 <= limit, ">=": 0.2 >= limit, "<": 0.2 < limit, ">": 0.2 > limit}[operator]
    assert state_of(found, operator, limit, with_bounds=False) == ("met" if estimate else "missed", "")


def test_what_has_no_number_or_no_interval_is_undecided():
    assert state_of(Estimate(NAN, NAN, NAN), "<=", 1, with_bounds=False) == ("undecided", "the score is not defined")
    assert state_of(Estimate(0.2, NAN, NAN), "<=", 1, with_bounds=True) == ("undecided", "the score has no interval")
    assert state_of(Estimate(0.2, NAN, NAN), "<=", 1, with_bounds=False) == ("met", "")
    assert states(["accuracy >= 0.5 at 95 %", "accuracy >= 0.5"], [score(0.6)]) == ["undecided", "met"]


@pytest.mark.parametrize(
    ("limit", "needed"),
    # The bound at 0.3 or 0.05 has to come as near to 0.2 as the limit: (0.1 / 0.04)² or (0.15 / 0.05)² as many.
    [(0.24, 630), (0.15, 900), (0.2, 0), (0.2 + 1e-5, 0), (0.3, 100), (0.29, 130)],
)
def test_how_many_examples_would_decide(limit, needed):
    assert examples_needed(Estimate(0.2, 0.05, 0.3), limit, 100) == needed
    assert examples_needed(Estimate(0.2, 0.05, 0.3), limit, 0) == 0
    assert examples_needed(Estimate(0.2, 0.05, 0.3), 0.29, 4) == 5
    assert examples_needed(Estimate(0.2, NAN, NAN), limit, 100) == 0


def test_an_undecided_gate_says_so():
    found = decide(
        [read_requirement("accuracy >= 0.7 at 95 %"), read_requirement("accuracy >= 0.9 at 95 %")], [shares(76)]
    )
    # Of Wilson's interval for 76 of 100 with 1.96 the ends are 0.668 and 0.833: (0.092 / 0.06)² · 100 = 237.
    assert [(gate.state, gate.needed) for gate in found] == [("undecided", 240), ("missed", 0)]


def test_the_bounds_are_one_sided_and_corrected_for_the_gates_with_a_level():
    # The 95 % interval 0 ± 1.96 has standard error 1, so that the one-sided 95 % bound lies at 1.645.
    one = score(0.0, low=-1.959963984540054, high=1.959963984540054)
    (gate,) = decide([read_requirement("accuracy <= 1.7 at 95 %")], [one])
    assert gate.state == "met" and gate.found.high == pytest.approx(1.6448536) and gate.tail == pytest.approx(0.05)
    assert gate.found.low == pytest.approx(-1.6448536)
    # Three gates have a level: 1 − 0.05 / 3 of the normal distribution lies below 2.128, 1 − 0.1 / 3 below 1.834.
    texts = ["accuracy <= 1.7 at 95 %", "accuracy >= -9 at 95 %", "accuracy <= 1.8 at 90 %", "accuracy <= 0"]
    found = decide(list(map(read_requirement, texts)), [one, replace(one, name="loss")])
    assert [gate.state for gate in found] == ["undecided", "met", "undecided", "met"]
    assert [gate.tail for gate in found] == pytest.approx([0.05 / 3, 0.05 / 3, 0.1 / 3, 0.025])
    assert found[0].found.high == pytest.approx(2.1280452) and found[3].found == one.estimate
    assert found[2].found.high == pytest.approx(1.8339146)
    # Every model that has the score is a gate of its own.
    two = decide([read_requirement("accuracy <= 1.7 at 95 %")], [one, replace(one, model="b")])
    assert [(gate.score.model, gate.tail) for gate in two] == [("a", 0.025), ("b", 0.025)]


def of_words(right: int, model: str) -> Score:
    """The share of 25 texts, with percentiles of resamples as `words` records them."""
    one = shares(right, model, of=25)
    found = estimate(resampled_sums(one.examples)[:, 0] / 25)
    return replace(one, low=found.low, high=found.high, better="lower")


def test_another_model_decides_nothing():
    """1 of 25 with a limit of 15 %: P(X ≤ 1) is .0931 at .15. A second model moves the tail to .025, where percentiles
    end at .136."""
    for models in ("a", "ab", "abc"):
        scores = [of_words(1 if model == "a" else 20, model) for model in models]
        gate = decide([read_requirement("accuracy <= 0.15 at 95 %")], scores)[0]
        z = NormalDist().inv_cdf(1 - 0.05 / len(models))
        assert gate.state == "undecided" and gate.found.high == pytest.approx(wilson_interval(1, 25, z)[1])


@pytest.mark.parametrize("models", [1, 2, 4])
@pytest.mark.parametrize("n", [6, 25, 80])
def test_a_share_is_decided_wrongly_no_more_than_promised(n, models):
    """Exactly, over all outcomes of a share that is the limit. Wilson's bounds alone are wrong in up to .2 of cases:
    1 of 80 is "missed" at a limit of .2 %, which happens in .15."""
    worst, others = {"met": 0.0, "missed": 0.0}, [shares(n, str(at), of=n) for at in range(1, models)]
    for limit in (0.002, 0.01, 0.03, 0.1, 0.15, 0.3, 0.5, 0.62, 0.8, 0.9, 0.97, 0.99):
        for operator in ("<=", ">="):
            gate = [read_requirement(f"accuracy {operator} {limit} at 95 %")]
            states = np.array([decide(gate, [shares(k, of=n), *others])[0].state for k in range(n + 1)])
            for state in worst:
                chance = binom.pmf(np.flatnonzero(states == state), n, limit).sum()
                worst[state] = max(worst[state], chance)
    assert max(worst.values()) <= 0.05 / models + 1e-12 and min(worst.values()) > 0.2 * 0.05 / models


def test_a_bound_that_wilson_moves_within_the_limit_too_soon():
    """1 of 80 has Wilson's lower bound at .0029, though a share of .0025 shows 1 or more in .18 of cases."""
    (gate,) = decide([read_requirement("accuracy <= 0.0025 at 95 %")], [shares(1, of=80)])
    assert gate.found.low > 0.0025 and 1 - 0.9975**80 > 0.18
    assert (gate.state, gate.needed) == ("undecided", 0) and "exact binomial" in gate.reason


class TestAgainstAReference:
    def test_the_better_side_is_the_scores(self):
        baseline = [score(0.8), score(2.0, name="loss", better="lower")]
        now = [score(0.79), score(2.1, name="loss", better="lower")]
        texts = ["accuracy no worse than baseline by {}", "loss no worse than baseline by {}"]
        assert states([text.format(0.05) for text in texts], now, baseline) == ["met", "missed"]
        assert states([text.format(0.11) for text in texts], now, baseline) == ["met", "met"]
        assert states([text.format(0) for text in texts], now, baseline) == ["missed", "missed"]
        assert states(["accuracy no worse than baseline"], [score(0.8)], baseline) == ["met"]
        assert states(["loss no worse than baseline"], [score(1.9, name="loss", better="lower")], baseline) == ["met"]

    def test_the_same_examples_are_paired(self):
        before, now = shares(80), shares(81)
        paired = decide([read_requirement("accuracy no worse than baseline by 0.03 at 95 %")], [now], [before])[0]
        other = replace(before, example_ids="other")
        apart = decide([read_requirement("accuracy no worse than baseline by 0.03 at 95 %")], [now], [other])[0]
        assert (paired.state, paired.paired, apart.state, apart.paired) == ("met", True, "undecided", False)
        # (f₁₂ + 1) / (n + 2) and (f₂₁ + 1) / (n + 2), with one example more right.
        more, less = 2 / 102, 1 / 102
        half = 1.6448536 * math.sqrt((more + less - (more - less) ** 2) / 102)
        assert paired.found.value == pytest.approx(0.01)
        assert (paired.found.low, paired.found.high) == pytest.approx((more - less - half, more - less + half))

    def test_fidelity_is_compared_with_the_same_model_alone(self):
        """ΔA depends on the scale of a model's logits, and neither side of growth is better."""
        own = [replace(score(0.2, model, name="fidelity[lrp]"), apart=LOGIT_SCALE) for model in "ab"]
        assert states(["fidelity[lrp] no worse than baseline"], own, own) == ["met", "met"]
        for text, baseline in (("b", ()), ("baseline", [replace(own[0], model="c")])):
            with pytest.raises(
                InputError, match=r"compares models, but ΔA depends on the scale of each model's logits"
            ):
                states([f"fidelity[lrp] no worse than {text}"], own, baseline)
        with pytest.raises(InputError, match="compares models, but ΔA"):
            check([read_requirement("fidelity[lrp] no worse than b")], plan("a", "b", data="sst2"))

    def test_a_model_of_the_same_report(self):
        found = decide(
            [read_requirement("accuracy no worse than b by 0.1")], [score(0.8), score(0.9, "b"), score(0.7, "c")]
        )
        assert [(gate.score.model, gate.state) for gate in found] == [("a", "met"), ("c", "missed")]
        assert found[0].reference == score(0.9, "b") and found[0].found.value == pytest.approx(-0.1)

    def test_the_baselines_model(self):
        text = "accuracy no worse than baseline"
        assert states([text], [score(0.8)], [score(0.9), score(0.7, "b")]) == ["missed"]
        assert states([text], [score(0.8), score(0.5, "b")], [score(0.7, "old")]) == ["met", "missed"]
        with pytest.raises(InputError, match="the baseline has no model 'a'; it has c, d"):
            states([text], [score(0.8)], [score(0.9, "c"), score(0.9, "d")])

    def test_scores_that_occur_several_times_are_compared_in_their_order(self):
        seeds = [score(0.8), score(0.6)]
        assert states(["accuracy no worse than baseline"], seeds, [score(0.7), score(0.7)]) == ["met", "missed"]
        with pytest.raises(InputError, match="a has 2 such scores and baseline has 1; compare reports of one plan"):
            states(["accuracy no worse than baseline"], seeds, [score(0.7)])


def test_a_named_model():
    scores = [score(0.8), score(0.3, "b"), score(1.0, "c", name="loss")]
    assert states(["accuracy >= 0.5 for b", "accuracy >= 0.5"], scores) == ["missed", "met", "missed"]
    refuses("c has no score accuracy", states, ["accuracy >= 0.5 for c"], scores)
    refuses("c has no score accuracy", states, ["accuracy no worse than c"], scores)


class TestRefusals:
    def test_an_unknown_score_names_those_that_resemble_it(self, monkeypatch):
        monkeypatch.setattr(module, "MAX_NAMES", 2)
        scores = [score(0.5, name=name) for name in ("loss", "words.success[textfooler]", "words.success[deepwordbug]")]
        with pytest.raises(InputError) as caught:
            states(["words.success[deepwordbugs] <= 0.5"], scores)
        told = "the report has no score 'words.success[deepwordbugs]'; it has words.success[deepwordbug], "
        assert told in str(caught.value) and " and 1 more; did you mean" in str(caught.value)
        refuses("has no score 'loss'; it has no scores$", states, ["loss <= 0.5"], [])

    def test_a_score_of_which_neither_side_is_better(self):
        with pytest.raises(InputError, match="neither side of accuracy is better; give limits with <= and >="):
            states(["accuracy no worse than b"], [score(0.5, better=""), score(0.5, "b", better="")])

    @pytest.mark.parametrize(("text", "says"), [
        ("accuracy >= 0.5 for demo/b", "no model 'demo/b'; there are demo/a, demo/c; did you mean"),
        ("accuracy no worse than demo/b", "no model 'demo/b'; there are demo/a, demo/c, baseline; did you mean"),
        ("accuracy no worse than demo/a for demo/a", "compares demo/a with itself"),
        ("acuracy >= 0.5", "has a score 'acuracy'; the scores are accuracy, cross-entropy; did you mean 'accuracy'?"),
        ("accuracy >= 79", "accuracy is a share from 0 to 1: write 0.79 or 79 %"),
        ("accuracy >= -3", "accuracy is a share from 0 to 1"),
        ("accuracy >= 120 %", "accuracy is a share from 0 to 1"),
        ("accuracy no worse than demo/a by 2", "the margin of accuracy is a share from 0 to 1: write 0.02 or 2 %"),
        ("cross-entropy <= -1", "cross-entropy is a number of at least 0"),
        ("cross-entropy <= 5 %", "cross-entropy is no share; give a number without %"),
        ("cross-entropy no worse than baseline", "the baseline has no score 'cross-entropy'; it has accuracy"),
    ])  # fmt: skip
    def test_before_anything_runs(self, text, says):
        said = refused(check, [read_requirement(text)], plan("demo/a", "demo/c"), [score(0.5)])
        assert says in said and said.startswith(f"require {text!r}")

    @pytest.mark.parametrize(("text", "says"), [
        ("noise.drop <= 5 at 95 %", "noise.drop is a share of at most 1: write 0.05 or 5 %"),
        ("noise.drop[10 %] <= 19.5", "noise.drop[10 %] is a share of at most 1: write 0.195 or 19.5 %"),
        ("sanity[lrp] <= 50", "sanity[lrp] is a number from -1 to 1"),
        ("fidelity >= 0.1", "has a score 'fidelity'; the scores are noise.drop, noise.drop[RATE %], "),
        ("fidelity >= 0.1", "did you mean 'fidelity[lrp]' or 'fidelity[survival]'?"),
        ("fidelity[lpr] >= 0.1", "did you mean 'fidelity[lrp]'"),
        ("sanity <= 0.5", "did you mean 'sanity[lrp]'"),
    ])  # fmt: skip
    def test_names_and_limits_of_other_verbs(self, text, says):
        verbs = [{"noise": {"data": "sst2"}}, {"fidelity": {"data": "sst2", "methods": ["lrp", "survival"]}}]
        made = planned({"models": ["demo/a"], "analyses": [*verbs, {"sanity": {"text": "a film"}}]})
        assert says in refused(check, [read_requirement(text)], made)
        fitting = ["noise.drop <= 5 %", "noise.drop >= -3", "noise.drop[10 %] <= .1", "fidelity[survival] >= 2"]
        check([*map(read_requirement, fitting), read_requirement("sanity[lrp] <= 0.5")], made)

    def test_a_model_alone_has_no_other_to_compare_with(self):
        check([read_requirement("accuracy no worse than demo/a")], plan("demo/a", "demo/b"))
        with pytest.raises(InputError, match="compares demo/a with itself; add another model"):
            check([read_requirement("accuracy no worse than demo/a")], plan("demo/a"))

    def test_benchmarks_have_the_names_of_the_harness(self):
        wanted = [read_requirement("acc,none[wnli] >= 0.5")]
        check(wanted, plan("demo/a", tasks="wnli"))
        with pytest.raises(InputError, match="is a share from 0 to 1: write 0.5 or 50 %"):
            check([read_requirement("acc,none[wnli] >= 50")], plan("demo/a", tasks="wnli"))
        refuses(r"a score 'acc,none\[wnli\]'; the scores are accuracy, cross-entropy$", check, wanted, plan("demo/a"))
        with pytest.raises(InputError, match="no verb of the plan has a score .*; the scores are none$"):
            check(wanted, planned({"models": ["demo/a"], "analyses": [{"heatmap": {"text": "a"}}]}))


class TestOfAReport:
    def report(self, monkeypatch, *entries) -> Report:
        monkeypatch.setattr(module, "report_scores", lambda report: [score(0.8)])
        return Report("A report", entries, {})

    def test_a_score_that_a_failed_job_would_give_is_undecided(self, monkeypatch):
        report = self.report(monkeypatch, entry("evaluate"), failed("words", "an error", ""))
        asked = list(
            map(read_requirement, ["words.success[x] <= 0.5 at 95 %", "accuracy >= 0.5 at 95 %", "accuracy >= 1 for b"])
        )
        found = report_gates(report, [*asked, read_requirement("accuracy no worse than c")], ())
        assert [gate.state for gate in found] == ["undecided", "undecided", "undecided", "undecided"]
        assert [gate.score.name for gate in found] == ["accuracy", "words.success[x]", "accuracy", "accuracy"]
        assert {gate.reason for gate in found[1:]} == {"not measured, because a job failed"}
        assert found[2].score.model == "b" and found[2].score.count == 0 and found[0].tail == pytest.approx(0.05)

    @pytest.mark.parametrize("entries", [(), (entry("words", state=LEFT_OUT),)])
    def test_otherwise_it_is_missed_and_the_others_are_decided(self, monkeypatch, entries):
        asked = ["words.success <= 0.5", "accuracy >= 0.5 at 95 %", "accuracy no worse than baseline"]
        found = report_gates(self.report(monkeypatch, *entries), [*map(read_requirement, asked)], ())
        assert [gate.requirement.text for gate in found] == [asked[1], asked[0], asked[2]]
        assert [gate.state for gate in found] == ["undecided", "missed", "missed"]
        assert found[1].reason == "the report has no score 'words.success'; it has accuracy"
        assert found[2].reason == "the baseline has no score 'accuracy'; it has no scores"
        # A gate without a score takes nothing of the level of the others.
        assert found[0].tail == pytest.approx(0.05)
