"""Headlines, which stand above views, figures and pages: every number of a stand-in is distinct."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_ins import NAN, Stand, e

from ssmscope.attacks.noise.result import NoiseLevel
from ssmscope.core.bootstrap import Estimate


def headline(result: Stand) -> str:
    """Return the class's own headline."""
    return result.real.headline.fget(result)


def of(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**values)


class TestPosition:
    def result(self, worst: tuple[int, ...], drops: tuple[float, ...] = (0.25, 0.5, 0.375), **values: Any) -> Stand:
        regions = tuple(
            of(region=f"{at}:{at + 1}", drop=e(drop), accuracy=e(0.8 - drop)) for at, drop in enumerate(drops)
        )
        given = dict(clean=e(0.875), average=e(0.625), unit="tokens", replacement="other", regions=regions)
        return Stand("position", **given | values, worst_regions=worst)

    def test_the_worst_region_is_named_where_it_stands_out(self) -> None:
        start = (
            "Position bias of own: accuracy 0.875 clean, 0.625 on average with tokens of 3 regions replaced by those "
        )
        start += "of another class"
        assert headline(self.result((1,))) == f"{start}, at worst 0.300 at 1:2"
        assert headline(self.result((2, 1))) == f"{start}, at worst 0.425 at 2:3, indistinguishable from 1 other"
        assert headline(self.result((1, 0, 2))) == headline(self.result(())) == start

    def test_of_one_region(self) -> None:
        assert " with tokens of 2 regions replaced by " in headline(self.result((1,), (0.25, 0.5)))
        assert headline(self.result((0,), (0.25,), unit="pixels", replacement="mean")) == (
            "Position bias of own: accuracy 0.875 clean, 0.625 on average with pixels of one region replaced by the "
            "mean"
        )


class TestOverflow:
    def test_of_the_longest_filler_at_each_place(self) -> None:
        curves = tuple(
            of(where=where, points=(of(tokens=0, accuracy=e(0.9)), of(tokens=2048, accuracy=e(last))))
            for where, last in (("after", 0.5), ("before", 0.75))
        )
        result = Stand("overflow", clean=e(0.875), curves=curves, chance=0.125)
        assert headline(result) == (
            "State overflow of own: accuracy 0.875 without filler, with 2,048 tokens of it 0.500 after and 0.750 "
            "before the text; chance 0.125"
        )


class TestPoison:
    def test_clean_then_random_then_found(self) -> None:
        attacks = {
            "random": of(survival=e(0.75)),
            "found": of(survival=e(0.25)),
        }
        own = of(survival=e(0.875), changes="it changes few", attack=attacks.__getitem__)
        other = of(survival=e(0.1), changes="it changes many", attack=None)
        result = Stand("poison", victims=(own, other))
        result.provenance["options"] = {"objective": "plant"}
        assert headline(result) == (
            "Hidden-state poisoning of own: survival 0.875 clean, 0.750 after random triggers, 0.250 after the one "
            "found (plant); it changes few"
        )

    def victim(self, model: str, first: float, planted: bool) -> Any:
        from ssmscope.attacks.poisoning.result import Alarm, Poisoned, Victim

        numbers = iter(0.01 * np.arange(100) + first)

        def number() -> Any:
            return e(float(next(numbers)))

        def attack(name: str, trigger: str | None) -> Poisoned:
            about = dict(name=name, trigger=trigger, triggers=1, value=float(next(numbers)), asked=len(name))
            about |= {each: number() for each in ("survival", "kept", "accuracy", "flipped")}
            alarms = tuple(Alarm(number(), number()) for _ in range(2))
            return Poisoned(**about, planted=number() if planted else None, alarms=alarms)

        clean = dict(model=model, survival=number(), accuracy=number(), planted=number() if planted else None)
        alarms = dict(thresholds=(0.5, 0.25), false_alarms=(number(), number()))
        return Victim(**clean, **alarms, attacks=(attack("random", None), attack("found", "zap")))

    def test_every_number_has_its_row_and_column(self) -> None:
        victims = (self.victim("one", 0.0, planted=True), self.victim("two", 0.5, planted=True))
        result = Stand("poison", victims=victims, detectors=("window", "token"))
        frame = result.real.to_frame.__wrapped__(result)
        assert frame.model.tolist() == ["one"] * 3 + ["two"] * 3
        assert frame.attack.tolist() == ["clean", "random", "found"] * 2
        for at, victim in enumerate(victims):
            rows = frame.iloc[3 * at : 3 * at + 3]
            assert rows["caught window"].tolist()[0] == victim.false_alarms[0].value
            assert rows["caught token"].tolist()[0] == victim.false_alarms[1].value
            for row, each in zip(rows.iloc[1:].to_dict("records"), victim.attacks):
                for name in ("survival", "kept", "accuracy", "flipped", "planted"):
                    assert row[name] == getattr(each, name).value
                assert (row["value"], row["asked"]) == (each.value, each.asked)
                found = [row[f"{what} {name}"] for name in ("window", "token") for what in ("auroc", "caught")]
                assert found == [one.value for alarm in each.alarms for one in (alarm.auroc, alarm.caught)]
            assert rows[["survival", "accuracy", "planted"]].iloc[0].tolist() == [
                victim.survival.value, victim.accuracy.value, victim.planted.value
            ]  # fmt: skip

    def test_tables_of_detectors_and_answers(self) -> None:
        from ssmscope.attacks.poisoning.result import _answers

        one = self.victim("one", 0.0, planted=False)
        seen = Stand("poison", detectors=("window", "token"))._seen(one)
        assert seen.columns == ("window: AUROC", "window: caught", "token: AUROC", "token: caught")
        rows = {label: [cell.value for cell in cells] for (label,), cells in seen.rows}
        assert rows == {
            "random triggers": ["0.090", "0.100", "0.110", "0.120"],
            "the search": ["0.180", "0.190", "0.200", "0.210"],
            "clean": ["", "0.020", "", "0.030"],
        }
        answers = {label: [cell.value for cell in cells] for (label,), cells in _answers(one).rows}
        assert answers == {
            "clean": ["0.000", "0.010", ""],
            "random triggers": ["0.050", "0.070", "0.080"],
            "the search": ["0.140", "0.160", "0.170"],
        }


class TestInsertion:
    def curve(self, phrase: str, *accuracies: float) -> Any:
        from ssmscope.attacks.insertion.result import InsertionCurve, Place

        places = tuple(
            Place(f"{50 * at} %", at / 2, accuracy=e(one), drop=e(0.0), flipped=e(0.0))
            for at, one in enumerate(accuracies)
        )
        return InsertionCurve(phrase, places, (int(np.argmin(accuracies)),), (), e(0.0), e(0.0))

    def test_of_the_phrase_that_is_hardest(self) -> None:
        one, two = self.curve("one", 0.7, 0.9, 0.8), self.curve("two", 0.8, 0.5, 0.6)
        result = Stand("insertion", clean=e(0.875), worst=e(0.25), curves=(one, two, one))
        assert headline(result) == (
            "Insertion sweep of own: accuracy 0.875 clean, 0.500 with “two” at its hardest place (50 %), 0.250 where "
            "phrase and place may differ by example"
        )
        result.curves = (one,)
        assert headline(result) == (
            "Insertion sweep of own: accuracy 0.875 clean, 0.700 with “one” at its hardest place (0 %), 0.250 where "
            "the place may differ by example"
        )


class TestWords:
    def test_clean_and_attacked(self) -> None:
        result = Stand("words", recipe="pwws", accuracy=e(0.875), attacked=e(0.25))
        assert headline(result) == "pwws on own: accuracy 0.875 clean, 0.250 under attack"


class TestPrompts:
    def result(self, worst: tuple[int, ...], **drops: float) -> Stand:
        attacks = tuple(of(name=name, drop=e(drop), accuracy=e(0.8 - drop)) for name, drop in drops.items())
        return Stand("prompts", average_clean=e(0.875), attacks=attacks, worst=worst)

    def test_the_worst_attack_is_named_where_it_stands_out(self) -> None:
        start = "Prompt attacks on own: accuracy 0.875 clean"
        assert headline(self.result((), pwws=NAN)) == f"{start}, no drop defined"
        assert headline(self.result((0,), pwws=0.125)) == f"{start}, 0.675 under pwws"
        two = self.result((1,), pwws=0.125, checklist=0.5)
        assert headline(two) == f"{start}, 0.300 under the worst on average, checklist"
        three = dict(pwws=0.125, checklist=0.5, stresstest=0.25)
        assert headline(self.result((1,), **three)) == f"{start}, 0.300 under the worst on average, checklist"
        assert headline(self.result((1, 2, 0), **three)) == (
            f"{start}, 0.300 to 0.675 attacked, under no attack clearly lowest"
        )
        same = dict(pwws=0.125, checklist=0.125, bertattack=NAN)
        assert headline(self.result((0, 1), **same)) == f"{start}, 0.675 attacked, under no attack clearly lowest"


class TestRetrieval:
    def result(self, lengths: tuple[int, ...], tasks: tuple[str, ...]) -> Stand:
        right = np.zeros((2, len(tasks), len(lengths), 8), dtype=bool)
        for model in range(2):
            for place in range(len(lengths)):
                right[model, 0, place, : 6 - 2 * model - place] = True
        return Stand("retrieval", models=("x", "y"), tasks=tasks, lengths=lengths, right=right)

    def test_of_the_shortest_and_the_longest_context(self) -> None:
        assert headline(self.result((0, 1000, 16000), ("qa1", "qa2"))) == (
            "Retrieval, accuracy on 2 tasks by context tokens: x 0.375 at 0 and 0.250 at 16,000; y 0.250 at 0 and "
            "0.125 at 16,000"
        )
        assert headline(self.result((50,), ("qa3",))) == (
            "Retrieval, accuracy on qa3 by context tokens: x 0.750 at 50; y 0.500 at 50"
        )
        result = self.result((0, 1000, 16000), ("qa1",))
        assert [result.mean(0, length) for length in result.lengths] == [0.75, 0.625, 0.5]


class TestLoss:
    def test_of_every_model(self) -> None:
        slopes = (Estimate(-0.25, -0.5, -0.125), Estimate(0.125, -0.25, 0.5))
        summaries = tuple(of(mean=e(mean), slope=slope) for mean, slope in zip((3.5, 3.25), slopes))
        more: dict[str, Any] = dict(
            unit="bits", remembrance=(), losses=np.zeros((2, 2048)), differences=(of(mean=Estimate(0.25, 0.125, 0.5)),)
        )
        result = Stand("loss", models=("x", "y"), summaries=summaries, **more)
        assert headline(result) == (
            "Loss by position, bits a token over 2,048 tokens: x 3.500, falling by 0.250 as the context doubles; "
            "y 3.250, not clearly falling as the context doubles (0.125 [−0.250, 0.500]); "
            "difference 0.250 [0.125, 0.500]"
        )
        unknown = (of(mean=e(3.5), slope=e(NAN)),)
        result = Stand("loss", models=("x",), summaries=unknown, **more)
        assert headline(result) == "Loss by position, bits a token over 2,048 tokens: x 3.500"


class TestLensFit:
    def test_tuned_then_logit(self) -> None:
        result = Stand("lens-fit", tuned=e(0.125), logit=e(2.5), layers=(None,) * 3)
        assert headline(result) == (
            "Tuned lens of own: KL to its own answers 0.125 nats, mean of 3 layers; logit lens 2.500"
        )


class TestBound:
    def test_holds_is_vacuous_or_is_none(self) -> None:
        def result(gap: Any, capacity: Any) -> Stand:
            return Stand("bound", gap=gap, capacity=capacity, examples=6920, length=1024)

        start, capacity = "Generalisation bound of own: ", of(log=12.5)
        assert headline(result(of(vacuous=False, bound=0.43217), capacity)) == (
            f"{start}losses differ by at most 0.432 at m = 6,920, ln C = 12.50 at T = 1,024"
        )
        assert headline(result(of(vacuous=True, bound=1.0), capacity)) == (
            f"{start}vacuous at m = 6,920, ln C = 12.50 at T = 1,024"
        )
        for one in (result(None, None), result(None, capacity), result(of(vacuous=False, bound=0.5), None)):
            assert headline(one) == f"{start}outside the theorem's assumptions"
        states = (None, of(vacuous=True), of(vacuous=False))
        assert [result(each, capacity).vacuous for each in states] == [None, True, False]

    def test_linear_attention_has_steps_of_one(self) -> None:
        def is_one(**changed: float) -> bool:
            norms = of(**{"B_A": 0.0, "B_q": 0.0, "p": float(np.log(np.e - 1)), **changed})
            return Stand("bound", norms=norms).is_linear_attention

        assert is_one() and not Stand("bound", norms=None).is_linear_attention
        for change in ({"p": 0.0}, {"p": 2.0}, {"B_A": 0.1}, {"B_q": 0.1}, {"B_A": 1.5e-6}, {"B_q": 1.5e-6}):
            assert not is_one(**change)
        exact = float(np.log(np.e - 1))
        assert is_one(B_A=0.9e-6) and is_one(B_q=0.9e-6) and is_one(p=exact + 1e-6) and not is_one(p=exact + 2.5e-6)


class TestStability:
    def layer(self, behaviour: str, parts: int = 1) -> SimpleNamespace:
        return of(behaviour=behaviour, parts=parts, why="a step grows", name="0")

    @pytest.mark.parametrize(
        ("behaviours", "parts", "said"),
        [
            (["unstable"], 1, "unstable"),
            (["stable"] * 2, 1, "stable in both layers"),
            (["stable"] * 4, 2, "stable in all 4 recurrences"),
            (["stable", "marginal", "marginal"], 1, "marginal in 2 of 3 layers"),
        ],
    )
    def test_in_how_many_layers(self, behaviours, parts, said) -> None:
        layers = tuple(self.layer(each, parts) for each in behaviours)
        result = Stand("stability", layers, layers=layers, behaviour=behaviours[-1])
        assert headline(result) == f"Stability of own: {said}"

    def test_in_words(self) -> None:
        def said(*layers: SimpleNamespace) -> str:
            return Stand("stability", layers, layers=layers, behaviour=layers[-1].behaviour).in_words()

        stable, worst = self.layer("stable"), of(behaviour="unstable", parts=1, why="s_A > 0", name="3")
        assert said(worst) == "The model is unstable: s_A > 0."
        assert said(stable, stable, stable) == "The model is stable in all 3 layers: a step grows."
        assert said(stable, stable, worst) == (
            "The model is unstable (2 stable, 1 unstable). The unstable layer, 3: s_A > 0."
        )
        assert said(stable, worst, worst) == (
            "The model is unstable (1 stable, 2 unstable). Of the unstable layers, 3: s_A > 0."
        )


class TestFidelity:
    def result(self, best: str, above: float = 0.05, **values: float) -> Stand:
        estimates = {name: e(value) for name, value in values.items()}
        result = Stand(
            "fidelity",
            methods=tuple(values),
            measures=("delta",),
            estimates=np.array([[[value, np.nan, np.nan]] for value in (*values.values(), 0.0)]),
            estimate=lambda name, measure="delta": estimates[name],
            difference=lambda name, other="random": e(0.1, above, 0.2),
        )
        result._best_named = lambda: best
        return result

    def test_the_best_method_and_how_far_methods_are_apart(self) -> None:
        three = dict(ig=0.25, lrp=0.5, occlusion=-0.125)
        assert headline(self.result("lrp", **three)) == "Fidelity of 3 methods on own: best ΔA 0.500 of lrp"
        assert headline(self.result("", **three)) == (
            "Fidelity of 3 methods on own: ΔA −0.125 to 0.500, no method clearly best"
        )
        assert headline(self.result("ig", above=-0.01, ig=0.25)) == (
            "Fidelity of 1 method on own: ΔA 0.250 of ig, no better than random rankings"
        )
        assert headline(self.result("", ig=0.25, lrp=0.25)) == (
            "Fidelity of 2 methods on own: ΔA 0.250, no method clearly best"
        )


def test_plausibility_and_sanity() -> None:
    estimates = tuple(map(e, (0.1, 0.2, 0.3, 0.1, 0.2, 0.75)))
    result = Stand("plausibility", methods=("ig", "lrp"), texts=(None,) * 5, estimates=estimates, chance=0.25)
    assert headline(result) == "Plausibility on own: AUPRC 0.750 of lrp, the best of 2; chance 0.250, 5 rationales"
    ends = [[0.1, 0.0, 0.2], [-0.9, -0.95, -0.8], [0.45, 0.3, 0.6], [NAN] * 3, [0.4, NAN, NAN]]
    more: dict[str, Any] = dict(estimates=np.array(ends)[:, None, None].repeat(3, 1).repeat(2, 2))
    result = Stand("sanity", methods=("ig", "lrp", "x", "y", "z"), parts=("none", "head", "layer 0"), **more)
    assert headline(result) == (
        "Sanity check on own: ig (0.10), z (0.40) depend on the weights; lrp (−0.90) hardly depend on them; x (0.45) "
        "undecided; y not defined (correlation with 2 parts randomised)"
    )


class TestCheckpoints:
    def row(self, name: str, behaviour: str = "stable", reason: str = "") -> SimpleNamespace:
        return of(name=name, behaviour=behaviour, reason=reason)

    def names(self, *given: str) -> list[str]:
        return Stand("stability-table", rows=tuple(map(self.row, given))).names

    def test_of_every_behaviour(self) -> None:
        rows = [self.row("a"), self.row("b", "unstable"), self.row("c"), self.row("d", "", "no such file")]
        result = Stand("stability-table", rows=tuple(rows), model="4 checkpoints")
        assert headline(result) == "Stability of 4 checkpoints: 2 stable, 1 unstable, 1 unreadable"

    def test_names_are_without_the_folder_that_all_are_in(self) -> None:
        assert self.names("runs/a/x.pth", "runs/b/x.pth") == ["a/x.pth", "b/x.pth"]
        assert self.names("/runs/a/x.pth", "/runs/a/y.pth") == ["x.pth", "y.pth"]
        assert self.names("runs/a/x.pth", "runs/a/x.pth") == ["x.pth", "x.pth"]
        assert self.names("/runs/x.pth", "demo/mamba") == ["/runs/x.pth", "demo/mamba"]
        assert self.names("runs/a/x.pth") == ["x.pth"]


class TestNoise:
    def test_at_the_highest_rate(self) -> None:
        nothing = e(0.0)
        levels = tuple(
            NoiseLevel(rate, errors, accuracy=e(accuracy), drop=nothing, flipped=nothing)
            for rate, accuracy, errors in ((0.05, 0.75, 0.05), (0.2, 0.5, 0.1912))
        )
        result = Stand("noise", clean=e(0.875), levels=levels, change="typed")
        assert headline(result) == (
            "Typing errors on own: accuracy 0.875 clean, 0.500 with errors in 19.1 % of the letters"
        )
