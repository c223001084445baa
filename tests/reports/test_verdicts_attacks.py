"""Verdicts on attacks in a report, number by number: the summary's line, and the comparison table."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from stand_ins import BEST, INTERVALS, NAN, WORST, Stand, beside, e, said, shown

from ssmscope.attacks.noise.result import NoiseLevel


class TestPosition:
    def result(self, *drops: float, clean: float = 0.8) -> Stand:
        regions = tuple(
            SimpleNamespace(region=name, drop=e(drop, drop - 0.05, drop + 0.05))
            for name, drop in zip(("0:32", "992:1024", "5:9"), drops)
        )
        worst = (int(np.nanargmax(drops)),) if not np.isnan(drops).all() else ()
        average = e(float(np.mean(drops)), 0.1, 0.3)
        return Stand("position", regions=regions, worst_regions=worst, average_drop=average, clean=e(clean, 0.7, 0.9))

    def test_verdict(self) -> None:
        assert said(self.result(0.1, 0.35)) == "average drop 22.5 % [10.0, 30.0], at worst 35.0 % at 992:1024"
        assert said(self.result(0.35, 0.1)) == "average drop 22.5 % [10.0, 30.0], at worst 35.0 % at 0:32"
        assert said(self.result(-0.2, -0.4)) == "average drop −30.0 % [10.0, 30.0], at worst −20.0 % at 0:32"
        tied = self.result(0.25, 0.25, 0.125)
        tied.worst_regions = (1, 0)
        assert said(tied).endswith(", at worst 25.0 % at 992:1024, indistinguishable from 1 other")
        tied.worst_regions = (1, 0, 2)
        assert said(tied) == "average drop 20.8 % [10.0, 30.0]"  # no region stands out
        one = self.result(0.1, NAN)
        one.average_drop = e(0.1, 0.05, 0.15)
        assert said(one) == "average drop 10.0 % [5.0, 15.0]"
        assert said(self.result(NAN, NAN)) == "accuracy 0.800 [0.700, 0.900], no drop defined"

    def test_table(self) -> None:
        table = beside(self.result(0.25, 0.5), self.result(0.375, 0.375, clean=0.75))
        assert table.columns == (
            "clean accuracy ↑", "drop at 0:32, % ↓", "drop at 992:1024, % ↓", "average drop, % ↓",
        )  # fmt: skip
        assert shown(table) == [
            ("a", "0.800 * [0.700, 0.900]", "25.0 * [20.0, 30.0]", "50.0 [45.0, 55.0]", "37.5 [10.0, 30.0]"),
            ("b", "0.750 [0.700, 0.900]", "37.5 [32.5, 42.5]", "37.5 * [32.5, 42.5]", "37.5 [10.0, 30.0]"),
        ]
        assert table.note == f"Drop: 1 − accuracy with the region replaced / clean accuracy. {BEST} {INTERVALS}"


class TestPrompts:
    def result(self, *drops: tuple[str, float], clean: float = 0.9) -> Stand:
        attacks = tuple(SimpleNamespace(name=name, drop=e(drop, drop - 0.1, drop + 0.1)) for name, drop in drops)
        return Stand(
            "prompts",
            attacks=attacks,
            average_clean=e(clean, 0.85, 0.95),
            as_promptbench=False,
            measured="Measured as ssmscope does.",
            cost=SimpleNamespace(asked=12_000, run=345),
        )

    def test_verdict(self) -> None:
        three = self.result(("stresstest", 0.1), ("checklist", 0.4), ("deepwordbug", 0.25))
        assert (
            said(three)
            == "PDR 40.0 % [30.0, 50.0] under checklist (▼ the worst), deepwordbug 25.0 %, stresstest 10.0 %"
        )
        assert said(self.result(("stresstest", -0.05))) == "PDR −5.0 % [−15.0, 5.0] under stresstest"
        assert said(self.result(("stresstest", NAN))) == "accuracy 0.900 [0.850, 0.950], no PDR defined"
        assert said(self.result(("stresstest", NAN), ("checklist", 0.2))) == "PDR 20.0 % [10.0, 30.0] under checklist"

    def test_table(self) -> None:
        table = beside(
            self.result(("stresstest", 0.1), ("checklist", 0.4)),
            self.result(("stresstest", 0.3), ("checklist", 0.2), clean=0.95),
        )
        assert table.columns == ("clean accuracy ↑", "PDR of stresstest, % ↓", "PDR of checklist, % ↓")
        assert shown(table) == [
            ("a", "0.900 [0.850, 0.950]", "10.0 * [0.0, 20.0]", "40.0 ! [30.0, 50.0]"),
            ("b", "0.950 * [0.850, 0.950]", "30.0 ! [20.0, 40.0]", "20.0 * [10.0, 30.0]"),
        ]
        assert table.note == (
            "PDR: 1 − accuracy under the attack / clean accuracy, mean over templates. "
            f"Measured as ssmscope does. {BEST} {WORST} {INTERVALS}"
        )
        alone = beside(self.result(("stresstest", 0.1)))
        assert shown(alone) == [("a", "0.900 [0.850, 0.950]", "10.0 [0.0, 20.0]")]

    def test_queries(self) -> None:
        assert self.result().queries_made == "12,000 filled prompts, 345 of them run"


class TestWords:
    def result(self, attacked: float, recipe: str = "deepwordbug") -> Stand:
        numbers = {
            "accuracy": e(0.9, 0.8, 1.0), "attacked": e(attacked, attacked - 0.1, attacked + 0.1),
            "success": e(1 - attacked / 0.9, 0.0, 1.0), "share": e(0.123, 0.1, 0.2), "queries": e(31.26, 30.0, 32.0),
        }  # fmt: skip
        examples = tuple(SimpleNamespace(queries=queries, gradients=2) for queries in (1_000, 234))
        return Stand(
            "words",
            accuracy=numbers["accuracy"],
            attacked=numbers["attacked"],
            recipe=recipe,
            summary=numbers,
            examples=examples,
        )

    def test_verdict(self) -> None:
        assert said(self.result(0.45)) == "accuracy 0.900, 0.450 [0.350, 0.550] under deepwordbug"

    def test_table(self) -> None:
        table = beside(self.result(0.45), self.result(0.18), self.result(0.3, "pwws"))
        assert table.columns == (
            "clean accuracy ↑", "accuracy under attack ↑", "success rate ↓", "share of words changed",
            "queries per example",
        )  # fmt: skip
        assert [row[:5] for row in shown(table)] == [
            ("a", "deepwordbug", "0.900 [0.800, 1.000]", "0.450 * [0.350, 0.550]", "0.500 * [0.000, 1.000]"),
            ("b", "deepwordbug", "0.900 [0.800, 1.000]", "0.180 [0.080, 0.280]", "0.800 [0.000, 1.000]"),
            ("c", "pwws", "0.900 [0.800, 1.000]", "0.300 [0.200, 0.400]", "0.667 [0.000, 1.000]"),
        ]
        assert shown(table)[0][5:] == ("0.123 [0.100, 0.200]", "31.3 [30.0, 32.0]")

    def test_queries(self) -> None:
        assert self.result(0.1).queries_made == "1,234 texts and 4 gradients"
        assert Stand("heatmap").queries_made == ""


class TestOverflow:
    def result(self, shift: float = 0.0) -> Stand:
        def curve(where: str, *accuracies: float) -> SimpleNamespace:
            steps = zip((0, 64, 1_024), accuracies)
            return SimpleNamespace(
                where=where,
                points=tuple(SimpleNamespace(tokens=t, accuracy=e(a + shift, a - 0.1, a + 0.1)) for t, a in steps),
            )

        curves = (curve("after", 0.9, 0.7, 0.5), curve("before", 0.9, 0.85, 0.625))
        return Stand("overflow", clean=e(0.9, 0.8, 1.0), curves=curves)

    def test_verdict(self) -> None:
        assert said(self.result()) == (
            "accuracy 0.900; with 1,024 tokens of filler 0.500 [0.400, 0.600] after and 0.625 [0.525, 0.725] before "
            "the text"
        )

    def test_table(self) -> None:
        table = beside(self.result(), self.result(0.25))
        assert (table.heads, table.columns) == (
            ("model", "filler"),
            ("without filler ↑", "64 tokens ↑", "1,024 tokens ↑"),
        )
        assert shown(table) == [
            ("a", "after", "0.900 [0.800, 1.000]", "0.700 [0.600, 0.800]", "0.500 [0.400, 0.600]"),
            ("a", "before", "0.900 [0.800, 1.000]", "0.850 [0.750, 0.950]", "0.625 [0.525, 0.725]"),
            ("b", "after", "0.900 [0.800, 1.000]", "0.950 * [0.600, 0.800]", "0.750 * [0.400, 0.600]"),
            ("b", "before", "0.900 [0.800, 1.000]", "1.100 * [0.750, 0.950]", "0.875 * [0.525, 0.725]"),
        ]


class TestInsertion:
    def result(self, worst: float) -> Stand:
        curves = tuple(
            SimpleNamespace(
                phrase=phrase,
                hardest=SimpleNamespace(accuracy=e(hard, hard - 0.1, hard + 0.1)),
                worst=e(worst, worst - 0.1, worst + 0.1),
            )
            for phrase, hard in (("and true", 0.7), ("not so", 0.6))
        )
        return Stand("insertion", clean=e(0.9, 0.8, 1.0), worst=e(worst, worst - 0.1, worst + 0.1), curves=curves)

    def test_verdict(self) -> None:
        assert said(self.result(0.4)) == (
            "accuracy 0.900, 0.400 [0.300, 0.500] with a phrase at each example’s worst place"
        )

    def test_table(self) -> None:
        table = beside(self.result(0.4), self.result(0.5))
        assert table.columns == ("clean accuracy ↑", "at the hardest place ↑", "worst of each example ↑")
        assert shown(table) == [
            ("a", "and true", "0.900 [0.800, 1.000]", "0.700 [0.600, 0.800]", "0.400 [0.300, 0.500]"),
            ("a", "not so", "0.900 [0.800, 1.000]", "0.600 [0.500, 0.700]", "0.400 [0.300, 0.500]"),
            ("b", "and true", "0.900 [0.800, 1.000]", "0.700 [0.600, 0.800]", "0.500 * [0.400, 0.600]"),
            ("b", "not so", "0.900 [0.800, 1.000]", "0.600 [0.500, 0.700]", "0.500 * [0.400, 0.600]"),
        ]


class TestEffect:
    def test_both(self) -> None:
        result = Stand(
            "effect",
            answer_name="positive 0.9 → negative 0.6",
            changed_name="2 tokens changed",
            kept=0.4,
            layers=(0, 3),
            state_cosine=np.array([0.5, -0.25]),
        )
        assert said(result) == "positive 0.9 → negative 0.6; 2 tokens changed"
        table = beside(result)
        assert table.columns == (
            "answer", "change", "p kept", "final states alike, layer 0", "final states alike, layer 3",
        )  # fmt: skip
        assert shown(table) == [("a", "positive 0.9 → negative 0.6", "2 tokens changed", "0.4000", "0.5000", "−0.2500")]
        assert table.note == "Alike: the cosine of the final states of the clean and the corrupted text."


class TestPoison:
    def result(self) -> Stand:
        from ssmscope.attacks.poisoning.result import Alarm, Poisoned, Victim

        def attack(name: str, trigger: str | None, survival: float, accuracy: float) -> Poisoned:
            alarm = Alarm(e(0.75, 0.7, 0.8), e(0.25))
            found = dict(name=name, trigger=trigger, triggers=1, value=0.5, asked=9, survival=e(survival, 0.1, 0.9))
            return Poisoned(**found, kept=e(0.5), accuracy=e(accuracy), flipped=e(0.125), planted=None, alarms=(alarm,))

        attacks = attack("random", None, 0.75, 0.8), attack("found", "zap \x1b", 0.5, 0.4)
        attacks += (attack("log-odds", None, 0.8, 0.8),)
        own = Victim("own", e(0.9), e(0.85), None, (1.0,), (e(0.05),), attacks, beyond=e(-0.03, -0.07, 0.01))
        made = Stand("poison", victims=(own,), detectors=("window",))
        made.provenance["options"] = {"objective": "forget", "detector": "window"}
        return made

    def test_verdict(self) -> None:
        assert said(self.result()) == (
            "survival 0.900, 0.500 [0.100, 0.900] after “zap ␛”, 0.750 after random triggers; it changes "
            "12.5 % of the right answers, other words of equal log-odds 12.5 %: a difference of −3.0 % [−7.0, 1.0]"
        )

    def test_beside(self) -> None:
        table = beside(self.result(), self.result())
        assert table.heads == ("model", "trigger")
        assert table.columns == ("survival ↑", "accuracy ↑", "flipped ↓", "AUROC, window")
        assert [row[0] for row in table.rows] == [
            (name, trigger) for name in "ab" for trigger in ("random triggers", "the search", "words of equal log-odds")
        ]
        assert [cell.value for cell in table.rows[1][1]] == ["0.500", "0.400", "0.125", "0.750"]


class TestNoise:
    def result(self, *drops: float) -> Stand:
        levels = tuple(
            NoiseLevel(rate, errors, accuracy=e(0.5), drop=e(drop, drop - 0.05, drop + 0.05), flipped=e(0.0))
            for rate, errors, drop in zip((0.05, 0.2), (0.05, 0.1912), drops)
        )
        return Stand(
            "noise",
            levels=levels,
            average_drop=e(float(np.mean(drops)), 0.1, 0.3),
            clean=e(0.8, 0.7, 0.9),
            change="typed",
        )

    def test_verdict(self) -> None:
        assert said(self.result(0.1, 0.3)) == (
            "average drop 20.0 % [10.0, 30.0], 30.0 % with errors in 19.1 % of the letters"
        )

    def test_table(self) -> None:
        table = beside(self.result(0.25, 0.5), self.result(0.125, 0.625))
        assert table.columns == (
            "clean accuracy ↑", "drop at 5 %, % ↓", "drop at 20 %, % ↓", "average drop, % ↓",
        )  # fmt: skip
