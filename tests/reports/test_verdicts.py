"""What a report says of every kind of result, number by number: a line of the summary, and a table beside others."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from stand_ins import INTERVALS, NAN, Stand, beside, e, found, said, shown

from ssmscope import load, patch, register
from ssmscope.interp.heatmap.result import ScoredText, SelectionHeatmap
from ssmscope.probes.evaluate.result import Score
from ssmscope.reports.grouping import verdict
from ssmscope.show.table import ROWS

BEST = "★ and bold: the best mean of those compared."
WORST = "▼ and underlined: the worst of its row."


# ---- the kinds, one after another


class TestFidelity:
    def result(self, shift: float = 0.0) -> Stand:
        numbers = {
            ("ig", "delta"): e(0.31, 0.29, 0.33), ("self-retention", "delta"): e(0.42 + shift, 0.4, 0.44),
            ("random", "delta"): e(0.01, -0.02, 0.04),
            ("ig", "morf"): e(0.2, 0.1, 0.3), ("self-retention", "morf"): e(0.25, 0.2, 0.3),
            ("random", "morf"): e(0.5, 0.4, 0.6),
        }  # fmt: skip
        return Stand(
            "fidelity",
            methods=("ig", "self-retention"),
            rows=("ig", "self-retention", "random"),
            measures=("delta", "morf"),
            data="sst2",
            best=lambda measure: ("self-retention",),
            estimate=lambda method, measure="delta": numbers[method, measure],
        )

    def test_verdict(self) -> None:
        assert said(self.result()) == "ΔA 0.420 [0.400, 0.440] of self-retention, the best of 2"
        both = self.result()
        both.best = lambda measure: ("ig", "self-retention") if measure == "delta" else ()
        assert said(both) == "ΔA 0.310 [0.290, 0.330] of ig and self-retention, the best of 2"

    def test_table(self) -> None:
        table = beside(self.result(), self.result(-0.2))
        assert table.heads == ("model", "data", "method")
        at = {name.rstrip(" ↑↓"): number for number, name in enumerate(table.columns)}
        assert sorted(name[-1] for name in table.columns) == ["↑", "↓"]
        delta = at["ΔA"]
        rows = [(*row[:3], row[3 + delta]) for row in shown(table)]
        assert rows == [
            ("a", "sst2", "ig", "0.310 [0.290, 0.330]"),
            ("a", "sst2", "self-retention", "0.420 * [0.400, 0.440]"),
            ("a", "sst2", "random", "0.010 [−0.020, 0.040]"),
            ("b", "sst2", "ig", "0.310 * [0.290, 0.330]"),
            ("b", "sst2", "self-retention", "0.220 [0.400, 0.440]"),
            ("b", "sst2", "random", "0.010 [−0.020, 0.040]"),
        ]
        less = [row[3 + (1 - delta)] for row in shown(table)]
        assert less[:3] == ["0.200 * [0.100, 0.300]", "0.250 [0.200, 0.300]", "0.500 [0.400, 0.600]"]
        assert table.note == f"{BEST} {INTERVALS}"


class TestPlausibility:
    def result(self) -> Stand:
        numbers = tuple(e(value, value - 0.05, value + 0.05) for value in (0.1, 0.2, 0.3, 0.4, 0.5, 0.25))
        return Stand("plausibility", methods=("ig", "lrp"), estimates=numbers, chance=0.1875)

    def test_verdict(self) -> None:
        assert said(self.result()) == "AUPRC 0.300 [0.250, 0.350] of ig, the best of 2; chance 0.188"

    def test_table(self) -> None:
        table = beside(self.result())
        assert (table.heads, table.columns) == (("model", "method"), ("token F1 ↑", "IOU F1 ↑", "AUPRC ↑"))
        assert shown(table) == [
            ("a", "ig", "0.100 [0.050, 0.150]", "0.200 [0.150, 0.250]", "0.300 * [0.250, 0.350]"),
            ("a", "lrp", "0.400 * [0.350, 0.450]", "0.500 * [0.450, 0.550]", "0.250 [0.200, 0.300]"),
        ]


class TestSanity:
    def test_verdict(self) -> None:
        numbers = {
            ("ig", "head"): e(0.9),
            ("ig", "layer 0"): e(-0.125, -0.25, 0.0),
            ("lrp", "layer 0"): e(0.5, 0.4, 0.6),
        }
        result = Stand(
            "sanity",
            methods=("ig", "lrp"),
            parts=("head", "layer 0"),
            estimate=lambda method, part: numbers[method, part],
        )
        assert said(result) == (
            "correlation with all parts randomised: ig −0.125 [−0.250, 0.000], lrp 0.500 [0.400, 0.600]"
        )

    def test_table_is_that_of_its_own(self) -> None:
        frame = pd.DataFrame({"method": ["ig"], "part": ["head"], "value": [0.25], "low": [0.1], "high": [0.4]})
        table = beside(Stand("sanity", to_frame=lambda: frame))
        assert (table.heads, table.columns) == ((), ("method", "part", "value"))
        assert shown(table) == [("ig", "head", "0.2500 [0.1000, 0.4000]")] and table.note == INTERVALS


class TestPosition:
    def result(self, first: float, last: float, clean: float = 0.8) -> Stand:
        regions = tuple(
            SimpleNamespace(region=name, drop=e(drop, drop - 0.05, drop + 0.05))
            for name, drop in (("0:32", first), ("992:1024", last))
        )
        return Stand(
            "position", regions=regions, average_drop=e((first + last) / 2, 0.1, 0.3), clean=e(clean, 0.7, 0.9)
        )

    def test_verdict(self) -> None:
        assert said(self.result(0.1, 0.35)) == "average drop 22.5 % [10.0, 30.0], worst 35.0 % at 992:1024"
        assert said(self.result(0.35, 0.1)) == "average drop 22.5 % [10.0, 30.0], worst 35.0 % at 0:32"
        assert said(self.result(-0.2, -0.4)) == "average drop −30.0 % [10.0, 30.0], worst −20.0 % at 0:32"
        tied = self.result(0.25, 0.25)
        assert said(tied) == "average drop 25.0 % [10.0, 30.0], worst 25.0 % at 0:32 and 992:1024 alike"
        tied.regions *= 2
        assert said(tied) == "average drop 25.0 % [10.0, 30.0], worst 25.0 % at 0:32 and 3 others alike"
        one = self.result(0.1, NAN)
        one.average_drop = e(0.1, 0.05, 0.15)
        assert said(one) == "average drop 10.0 % [5.0, 15.0]"
        assert said(self.result(NAN, NAN)) == "accuracy 0.800 [0.700, 0.900], no drop defined"

    def test_table(self) -> None:
        table = beside(self.result(0.25, 0.5), self.result(0.375, 0.375, 0.75))
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
        assert self.result().queries_made == "12,000 filled prompts, of which 345 were run"


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


class TestStability:
    def result(self, behaviour: str, counts: dict[str, int], **largest: float) -> Stand:
        columns = {"spectral_abscissa": -0.5, "largest_gain": 0.25, "possible_gain": 1.5, "growth": -2.0, **largest}
        frame = pd.DataFrame({name: [value - 1, value] for name, value in columns.items()})
        number = sum(counts.values())
        return Stand(
            "stability",
            (None,) * number,
            behaviour=behaviour,
            unit="layers",
            counts=lambda: counts,
            to_frame=lambda: frame,
        )

    def test_verdict(self) -> None:
        assert said(self.result("stable", {"stable": 3, "unstable": 0})) == "stable in all 3 layers"
        assert said(self.result("stable", {"stable": 1})) == "stable in its one layer"
        mixed = self.result("unstable", {"stable": 3, "marginal": 0, "unstable": 1})
        assert said(mixed) == "unstable: 3 stable, 1 unstable of 4 layers"

    def test_table(self) -> None:
        mixed = self.result("unstable", {"stable": 3, "marginal": 0, "unstable": 1}, growth=math.inf)
        table = beside(mixed, self.result("stable", {"stable": 2}, possible_gain=NAN))
        assert table.columns == (
            "behaviour", "layers",
            "largest spectral abscissa", "largest gain", "largest possible gain", "largest growth",
        )  # fmt: skip
        assert shown(table) == [
            ("a", "unstable", "3 stable, 1 unstable", "−0.5000", "0.2500", "1.500", "∞"),
            ("b", "stable", "2 stable", "−0.5000", "0.2500", "–", "−2"),
        ]
        assert table.note == (
            "Gains and growth are natural logarithms per token, the spectral abscissa is per unit of Δ."
        )


class TestStabilityTable:
    def result(self) -> Stand:
        def row(**values: Any) -> SimpleNamespace:
            return SimpleNamespace(
                **{"reason": "", "behaviour": "stable", "abscissa": -0.0123, "vacuous": None, **values}
            )

        rows = (
            row(), row(behaviour="unstable", abscissa=0.5, vacuous=False, bound=0.71234), row(vacuous=True),
            row(reason="no such file"),
        )  # fmt: skip
        frame = pd.DataFrame({"model": ["x", "y"], "abscissa": [-0.0123, 0.5]})
        table = Stand("stability-table", rows=rows, headline="Stability of own: 4 models", to_frame=lambda: frame)
        table.provenance["given"] = ["a", "b", "c", "d"]
        return table

    def test_verdict(self) -> None:
        models = ("a", "b", "c", "d")
        assert [said(self.result(), model, models) for model in models] == [
            "stable, s_A −0.0123", "unstable, s_A 0.5, bound 0.712", "stable, s_A −0.0123, bound vacuous",
            "unreadable: no such file",
        ]  # fmt: skip
        of_a_directory = self.result()
        of_a_directory.provenance["given"] = ["sweep", "d"]
        assert said(of_a_directory, "a", ("a", "b")) == "4 models"

    def test_table_is_that_of_its_own(self) -> None:
        assert shown(beside(self.result())) == [("x", "−0.01230"), ("y", "0.5000")]


class TestBound:
    def result(self, gap: Any, capacity: Any) -> Stand:
        return Stand(
            "bound", gap=gap, capacity=capacity, examples=6_920, length=1_024, headline="Bound of own: none at T = 5"
        )

    def test_verdict_is_its_headline(self) -> None:
        assert said(self.result(None, None)) == "none at T = 5"

    def test_table(self) -> None:
        holds = self.result(SimpleNamespace(vacuous=False, bound=0.43217), SimpleNamespace(log=12.5))
        vacuous = self.result(SimpleNamespace(vacuous=True, bound=7.0), SimpleNamespace(log=900.25))
        table = beside(holds, vacuous, self.result(None, None))
        assert table.columns == ("bound", "m", "T", "losses differ by at most", "ln C")
        assert shown(table) == [
            ("a", "holds", "6,920", "1,024", "0.4322", "12.50"),
            ("b", "vacuous", "6,920", "1,024", "–", "900.2"),
            ("c", "outside the assumptions", "6,920", "1,024", "–", "–"),
        ]


class TestSnr:
    def result(self) -> Stand:
        def curve(
            model: str, task: str, average: float, accuracy: float, length: int | None = 1_000
        ) -> SimpleNamespace:
            means = (e(average, average - 0.1, average + 0.1), e(accuracy, accuracy - 0.1, accuracy + 0.1))
            return SimpleNamespace(model=model, task=task, average=means[0], accuracy=means[1], length=length)

        curves = (
            curve("x", "qa1", 0.2, 0.9), curve("y", "qa1", 0.4, 0.8), curve("x", "qa2", 0.1, 0.3),
            curve("y", "qa2", 0.1, 0.5), curve("x", "own", 0.7, 0.6, None),
        )  # fmt: skip
        first = {one.model: one for one in reversed(curves)}
        models = tuple(SimpleNamespace(name=name) for name in ("x", "y"))
        return Stand("snr", models=models, curves=curves, unit="words", curve=lambda name: first[name])

    def test_verdict(self) -> None:
        both = ("m", "n")
        assert said(self.result(), "m", both) == (
            "needle probability 0.200 [0.100, 0.300], mean of layers; accuracy 0.900 [0.800, 1.000] at 1,000 words"
        )
        assert said(self.result(), "n", both) == (
            "needle probability 0.400 [0.300, 0.500], mean of layers; accuracy 0.800 [0.700, 0.900] at 1,000 words"
        )
        alone = self.result()
        alone.curve = lambda name: alone.curves[-1]
        assert said(alone, "m", both).endswith("accuracy 0.600 [0.500, 0.700]")

    def test_table(self) -> None:
        table = beside(self.result(), models=("m", "n"))
        assert table.heads == ("model", "task", "context")
        assert table.columns == ("needle probability, mean of layers ↑", "accuracy ↑")
        assert shown(table) == [
            ("m", "qa1", "1,000 words", "0.200 [0.100, 0.300]", "0.900 * [0.800, 1.000]"),
            ("n", "qa1", "1,000 words", "0.400 * [0.300, 0.500]", "0.800 [0.700, 0.900]"),
            ("m", "qa2", "1,000 words", "0.100 [0.000, 0.200]", "0.300 [0.200, 0.400]"),
            ("n", "qa2", "1,000 words", "0.100 [0.000, 0.200]", "0.500 * [0.400, 0.600]"),
            ("m", "own", "–", "0.700 [0.600, 0.800]", "0.600 [0.500, 0.700]"),
        ]


class TestRetrieval:
    def result(self, tasks: tuple[str, ...] = ("qa1", "qa2"), lengths: tuple[int, ...] = (0, 1_000, 16_000)) -> Stand:
        values = {(0, "qa1"): (0.9, 0.8, 0.3), (0, "qa2"): (0.7, 0.5, 0.2), (1, "qa1"): (0.9, 0.6, 0.4),
                  (1, "qa2"): (0.6, 0.6, 0.1)}  # fmt: skip
        cells = tuple(
            tuple(
                tuple(SimpleNamespace(accuracy=e(v, v - 0.1, v + 0.1)) for v in values[at, task][: len(lengths)])
                for task in tasks
            )
            for at in (0, 1)
        )
        means = {
            (at, length): np.mean([values[at, task][place] for task in tasks])
            for at in (0, 1)
            for place, length in enumerate(lengths)
        }
        return Stand(
            "retrieval",
            models=("x", "y"),
            tasks=tasks,
            lengths=lengths,
            cells=cells,
            mean=lambda at, length: means[at, length],
        )

    def test_verdict(self) -> None:
        both = ("m", "n")
        assert said(self.result(), "m", both) == (
            "accuracy 0.800 at 0 tokens and 0.250 at 16,000 tokens, mean of 2 tasks"
        )
        assert said(self.result(), "n", both) == (
            "accuracy 0.750 at 0 tokens and 0.250 at 16,000 tokens, mean of 2 tasks"
        )
        assert said(self.result(("qa2",), (0,)), "n", both) == "accuracy 0.600 at 0 tokens, 1 task"

    def test_table(self) -> None:
        table = beside(self.result(), models=("m", "n"))
        assert (table.heads, table.note.partition(".")[0]) == (("model", "task"), "Lengths are in tokens of context")
        assert table.columns == ("accuracy at 0 ↑", "accuracy at 1,000 ↑", "accuracy at 16,000 ↑")
        assert shown(table) == [
            ("m", "qa1", "0.900 [0.800, 1.000]", "0.800 * [0.700, 0.900]", "0.300 [0.200, 0.400]"),
            ("m", "qa2", "0.700 * [0.600, 0.800]", "0.500 [0.400, 0.600]", "0.200 * [0.100, 0.300]"),
            ("n", "qa1", "0.900 [0.800, 1.000]", "0.600 [0.500, 0.700]", "0.400 * [0.300, 0.500]"),
            ("n", "qa2", "0.600 [0.500, 0.700]", "0.600 * [0.500, 0.700]", "0.100 [0.000, 0.200]"),
        ]


class TestLoss:
    def result(self) -> Stand:
        def summary(mean: float, *parts: float) -> SimpleNamespace:
            return SimpleNamespace(
                mean=e(mean, mean - 0.5, mean + 0.5), bins=tuple(e(part, part, part) for part in parts)
            )

        made = Stand(
            "loss",
            models=("x", "y"),
            summaries=(summary(3.5, 4.0, 3.0), summary(3.25, 4.25, 2.5)),
            unit="bits",
            bins=((0, 16), (16, 2_048)),
        )
        made.provenance["data"] = {"name": "wikitext2"}
        return made

    def test_verdict(self) -> None:
        assert said(self.result(), "m", ("m", "n")) == "3.500 [3.000, 4.000] bits a token"
        assert said(self.result(), "n", ("m", "n")) == "3.250 [2.750, 3.750] bits a token"

    def test_table(self) -> None:
        table = beside(self.result(), models=("m", "n"))
        assert table.columns == ("bits a token ↓", "after 0 to 16 ↓", "after 16 to 2,048 ↓")
        assert shown(table) == [
            ("m", "3.500 [3.000, 4.000]", "4.000 *", "3.000"),
            ("n", "3.250 * [2.750, 3.750]", "4.250", "2.500 *"),
        ]


class TestLensFit:
    def result(self) -> Stand:
        return Stand("lens-fit", tuned=e(0.125, 0.1, 0.15), logit=e(2.5, 2.25, 2.75))

    def test_both(self) -> None:
        assert said(self.result()) == (
            "KL 0.125 [0.100, 0.150] nats with the tuned lens, 2.500 [2.250, 2.750] with the logit lens"
        )
        table = beside(self.result())
        assert table.columns == ("tuned lens", "logit lens")
        assert shown(table) == [("a", "0.125 [0.100, 0.150]", "2.500 [2.250, 2.750]")]
        assert table.note == f"KL to the model's own answers in nats, mean over layers. {INTERVALS}"


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


class TestInfluence:
    def test_both(self) -> None:
        shares = {8: e(0.625, 0.5, 0.75), 4: e(0.1)}
        contexts = {0.9: 37.0, 0.5: 3.0}
        reach = SimpleNamespace(
            place="output",
            decay=SimpleNamespace(
                rate=e(0.01234567, 0.01, 0.015), length=e(81.0, 70.0, 90.0), defined=True, straight=True
            ),
            recent=lambda tokens: shares[tokens],
            effective_context=lambda share, within=False: contexts[share] - 7 * within,
        )
        result = Stand("influence", output=reach, recent=8, unit="tokens", lengths=np.array([50, 60, 70]))
        assert said(result) == "decay length 81, 90 % of it within 37 tokens"
        reach.decay.straight, contexts[0.5] = False, 10.0
        assert said(result) == "half of it in the last 3 of 60 tokens, 90 % in the last 30"
        table = beside(result)
        assert table.heads == ("model", "of")
        assert table.columns == ("rate λ", "decay length", "share of the last 8", "90 % held within")
        cells = ("0.01235 [0.01000, 0.01500]", "81 [70, 90]", "0.625 [0.500, 0.750]", "37")
        assert shown(table) == [("a", "output", *cells)]


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
        assert table.note == "Alike: the cosine of the states before and after the change."


class TestTrajectory:
    def test_verdict(self) -> None:
        texts = (SimpleNamespace(settled=np.array([1, 2])), SimpleNamespace(settled=np.array([4])))
        result = Stand("trajectory", texts=texts, layers=6, lens="logit lens")
        assert said(result) == "the answer leads from layer 2.3 of 6 on, mean of 3 positions, logit lens"
        one = Stand("trajectory", texts=texts[1:], layers=6, lens="tuned lens")
        assert said(one) == "the answer leads from layer 4 of 6 on, tuned lens"

    def test_table_is_that_of_its_own(self) -> None:
        frame = pd.DataFrame({"layer": [0, 1], "kl": [0.5, 0.125]})
        assert shown(beside(Stand("trajectory", to_frame=lambda: frame))) == [("0", "0.5000"), ("1", "0.1250")]


class TestHeatmap:
    TOKENS = (" good", " film", " so", "-so", "[CLS]")

    def text(self, mean: list[float], rationale: tuple[int, ...], answer: str = "positive", p: float = 0.75) -> Any:
        scores = np.array(mean, dtype=np.float32)
        lives = np.array([[2, 3, np.inf, np.inf, np.inf]], dtype=np.float32)
        return ScoredText(self.TOKENS, (0, 1, 2, 2, None), scores[None], scores, rationale, answer, p, half_lives=lives)

    def result(self, *texts: Any, score: str = "survival") -> Any:
        return SelectionHeatmap({"model": "own"}, texts, score=score, layers=(3,), size=2, by_layer=True)

    def test_verdict(self) -> None:
        first = self.text([0.05, 0.1, 0.3, 0.2, 0.3], (2, 3, 1))
        assert said(self.result(first)) == (
            "“so-so” 50 %, “film” 10 % of the states at the end; "
            "half of what is written is left after more than 5 tokens (layer 3)"
        )
        assert said(self.result(first, score="retention")) == "highest retention: “so-so” 0.250, “film” 0.100 (layer 3)"
        nothing = self.text([0.2] * 5, ())
        assert said(self.result(nothing)) == (
            "nothing stands out: no word holds much more than others (survival, layer 3)"
        )
        flat = dataclasses.replace(nothing, flat=(True, True))
        assert said(self.result(flat)).startswith("nothing stands out: the spread over tokens is noise")
        four = self.result(first, nothing, first, first)
        assert said(four) == (
            "survival, layer 3: text 0: “so-so” 50 %, “film” 10 %; text 1: nothing stands out; text 2: “so-so” 50 %, "
            "“film” 10 %; 1 more text"
        )
        images = self.result(dataclasses.replace(first, pixels=np.zeros((2, 2, 1), np.float32)))
        assert said(images) == "survival of 1 image, layer 3"

    def test_table(self) -> None:
        first = self.text([0.05, 0.1, 0.3, 0.2, 0.3], (2, 3, 1))
        table = beside(self.result(first, self.text([0.2] * 5, (), answer="negative", p=0.6)))
        assert (table.heads, table.columns) == (("model", "text"), ("answer", "p", "score", "stands out"))
        assert shown(table) == [
            ("a", "0", "positive", "0.750", "survival", "so-so 50 % · film 10 %"),
            ("a", "1", "negative", "0.600", "survival", "nothing"),
        ]
        assert table.note == ""
        many = beside(self.result(*[first] * (ROWS + 1)))
        assert len(many.rows) == ROWS and many.remarks == f"{ROWS} of {ROWS + 1} rows."


class TestAttention:
    def text(self, *distances: float) -> Any:
        maps = [SimpleNamespace(readouts=SimpleNamespace(distance=one)) for one in distances]
        return SimpleNamespace(maps=maps, ahead=False)

    def test_verdict(self) -> None:
        def result(*texts: Any) -> Stand:
            return Stand("attention", texts, level_name="block level")

        assert said(result(self.text(1.0, 2.0), self.text(NAN, 6.0))) == (
            "attends 3.0 tokens back on average, block level, 3 maps"
        )
        assert said(result(self.text(2.25, NAN))) == "attends 2.2 tokens back on average, block level, one map"
        assert said(result(self.text(NAN, NAN))) == "block level, 2 maps without mass"

    def test_table(self) -> None:
        def result(distance: float, outside: Any = NAN) -> Stand:
            frame = pd.DataFrame(
                {
                    "text": [0, 1],
                    "layer": ["0", "0"],
                    "part": ["", ""],
                    "distance": [distance, 2.0],
                    "outside": [NAN, outside],
                }
            )
            return Stand("attention", summary=lambda: frame)

        table = beside(result(1.5), result(2.5))
        assert (table.heads, table.columns) == (("model",), ("text", "layer", "distance"))
        assert shown(table) == [
            ("a", "0", "0", "1.500"), ("a", "1", "0", "2"), ("b", "0", "0", "2.500"), ("b", "1", "0", "2"),
        ]  # fmt: skip
        assert beside(result(1.5), result(2.5, 0.25)).columns == ("text", "layer", "distance", "outside")


class TestExplain:
    def result(self, converged: list[Any], texts: int = 2) -> Stand:
        tokens = ("a", " good", " film")
        attributions = (
            SimpleNamespace(method="ig", scores=np.array([0.25, -1.5, 0.125]), delta=0.0123),
            SimpleNamespace(method="self-retention", scores=np.array([1.0, 2.0, 3.0]), delta=None),
        )

        def text(number: int) -> Any:
            return SimpleNamespace(
                tokens=tokens,
                attributions=attributions,
                target="positive",
                value=0.5 + number,
                top=lambda each, size: np.argsort(-each.scores)[:size].tolist(),
                against=lambda each, size: [at for at in np.argsort(each.scores)[:size] if each.scores[at] < 0],
            )

        return Stand(
            "explain",
            tuple(map(text, range(texts))),
            methods=("ig", "self-retention"),
            summary=lambda: pd.DataFrame({"converged": pd.array(converged, dtype="boolean")}),
            top=2,
        )

    def test_verdict(self) -> None:
        assert said(self.result([True, None, True, None])) == "ig, self-retention on 2 texts"
        assert said(self.result([True, None, False, None])) == (
            "ig, self-retention on 2 texts; 1 of 4 attributions incomplete"
        )
        assert said(self.result([True], texts=1)) == "ig, self-retention on 1 text"

    def test_table(self) -> None:
        table = beside(self.result([True], texts=1))
        assert table.heads == ("model", "text", "method")
        assert table.columns == ("of", "f", "highest scores", "strongest against", "relative error of the sum")
        assert shown(table) == [
            ("a", "0", "ig", "positive", "0.5000", "a 0.250 · film 0.125", "good −1.50", "0.01230"),
            ("a", "0", "self-retention", "positive", "0.5000", "film 3 · good 2", "", "–"),
        ]
        many = beside(self.result([True], texts=ROWS // 2 + 1))
        assert len(many.rows) == ROWS and many.remarks == f"{ROWS} of {ROWS + 2} rows."


# ---- what all kinds have


class TestKnockout:
    def test_both(self) -> None:
        from ssmscope.interp.knockout.result import Cut, Knockout

        cuts = (Cut(0, 1), Cut(1, 1), Cut(0, 0))
        changes = np.array([[[-0.5, -0.6, -0.4], [-0.45, -0.5, -0.4], [0.01, 0.0, 0.02]]])
        result = Stand("knockout", sources=("attic",), cuts=cuts, changes=changes)
        for name in ("change", "_largest", "_whole"):
            setattr(result, name, getattr(Knockout, name).__get__(result))
        assert said(result) == (
            "the answer's probability changes by “attic” −50.0 % [−60.0, −40.0] in all layers, "
            "most in layer 1 (−45.0 %)"
        )
        table = beside(result)
        assert (table.heads, table.columns) == (("model", "from"), ("all layers", "most in", "there"))
        changes[..., 1:], changes[0, 0, 0] = NAN, -0.0002  # of a single text there are no intervals
        assert said(result) == (
            "the answer's probability changes by “attic” 0.0 % in all layers, most in layer 1 (−45.0 %)"
        )


class TestPatch:
    def test_both(self) -> None:
        model = load("demo/sst2-mamba2")
        result = patch(model, clean="A gripping film.", corrupted="A tedious film.")
        places = result.effects()[:2]
        most = float(places.flat[np.abs(places).argmax()])
        assert result.verdict().startswith("most in layer 0, ") and f"{most:.3g}" in result.verdict()
        table = type(result).compare([result], [("a",)])
        assert (table.heads, table.columns[0]) == (("model", "site"), "most in")


class TestAblate:
    def result(self) -> Stand:
        from ssmscope.interp.ablate.result import Unit

        harms = np.zeros((2, 3, 3))
        harms[:, 0] = [[0.01, -0.02, 0.015], [0.5, 0.25, 0.75]]
        plain = np.array([[0.25, 0.2, 0.3], [0.9, 0.8, 1.0], [0.8, 0.7, 0.9]])
        units = (Unit(0, head=0), Unit(0, head=1))
        return Stand("ablate", what="head", metric="loss", units=units, harms=harms, plain=plain)

    def test_both(self) -> None:
        result = self.result()
        assert said(result) == (
            "1 of 2 heads can go alone; most harm: layer 0, head 1, loss worse by 0.500 [0.250, 0.750]"
        )
        table = beside(result)
        assert table.heads == ("model", "ablated") and table.columns == ("loss", "can go", "most harm", "worse by")
        assert [cell.value for cell in table.rows[0][1]] == ["0.250", "1 of 2", "layer 0, head 1", "0.500"]


class TestSteer:
    def test_both(self) -> None:
        probability = np.array([[[0.5, 0.4, 0.6], [0.9, 0.8, 1.0]], [[0.5, 0.4, 0.6], [0.45, 0.4, 0.5]]])
        probability = np.concatenate([probability, probability[:1] - probability[1:]])
        costs = np.zeros((3, 2, 3, 3))
        costs[0, 1, 1] = [0.75, 0.7, 0.8]
        result = Stand(
            "steer", site="state", strengths=(0.0, 2.0), answers=("good", "good"), probability=probability, costs=costs,
            classifies=True,
        )  # fmt: skip
        assert said(result) == (
            "at strength 2 the probability of “good” is 0.900 [0.800, 1.000], with random directions 0.450 "
            "[0.400, 0.500]; accuracy on other data 0.750 [0.700, 0.800]"
        )
        table = beside(result)
        assert table.columns == ("strength", "probability", "random", "held-out accuracy")


class TestPoison:
    def result(self) -> Stand:
        from ssmscope.attacks.poisoning.result import Alarm, Poisoned, Victim

        def attack(name: str, trigger: str | None, survival: float, accuracy: float) -> Poisoned:
            alarm = Alarm(e(0.75, 0.7, 0.8), e(0.25))
            found = dict(name=name, trigger=trigger, triggers=1, value=0.5, asked=9, survival=e(survival, 0.1, 0.9))
            return Poisoned(**found, kept=e(0.5), accuracy=e(accuracy), flipped=e(0.125), planted=None, alarms=(alarm,))

        attacks = attack("random", None, 0.75, 0.8), attack("found", "zap \x1b", 0.5, 0.4)
        own = Victim("own", e(0.9), e(0.85), None, (1.0,), (e(0.05),), attacks)
        made = Stand("poison", victims=(own,), detectors=("window",))
        made.provenance["options"] = {"objective": "forget", "detector": "window"}
        return made

    def test_verdict(self) -> None:
        assert said(self.result()) == (
            "survival 0.900, 0.500 [0.100, 0.900] behind “zap ␛”, 0.750 behind random triggers; accuracy 0.850, "
            "0.400 and 0.800"
        )

    def test_beside(self) -> None:
        table = beside(self.result(), self.result())
        assert table.heads == ("model", "trigger")
        assert table.columns == ("survival ↑", "accuracy ↑", "flipped ↓", "AUROC, window")
        assert [row[0] for row in table.rows] == [(name, trigger) for name in "ab" for trigger in TRIGGERS]
        assert [cell.value for cell in table.rows[1][1]] == ["0.500", "0.400", "0.125", "0.750"]


TRIGGERS = ("random triggers", "the search")


class TestHeatmapData:
    def result(self, *words: tuple[str, float]) -> Stand:
        from ssmscope.interp.heatmap.result import KeptWord

        found = tuple(KeptWord(word, 9, 9, e(kept, kept - 0.25, kept + 0.25)) for word, kept in words)
        return Stand("heatmap-data", score="survival", texts=1000, words=found, by_layer=(), groups=())

    def test_verdict(self) -> None:
        assert said(self.result(("tears", 3.0), ("joy", 2.5), ("x", 2.0), ("the", 0.5))) == (
            "highest: “tears” 3.000 [2.750, 3.250] times an even share, then “joy”, “x”; lowest: “the” 0.500 "
            "[0.250, 0.750] (survival, 1,000 texts)"
        )
        assert said(self.result()) == "survival over 1,000 texts; no word stands in enough of them"

    def test_beside(self) -> None:
        assert not beside(self.result(), self.result()).rows


class TestPair:
    def test_each_models_line_is_its_own(self) -> None:
        pair = Stand("pair", results=(Stand("bound", headline="Bound of own: a"), TestHeatmapData().result()))
        both = found(pair, ("m", "n"))
        assert verdict(both, "m") == said(pair.results[0]) and "1,000 texts" in verdict(both, "n")


class TestEvaluate:
    def result(self) -> Stand:
        scores = (
            Score("wnli", "acc", e(0.543, 0.425, 0.66), True, 0, 70),
            Score("own", "word_perplexity", e(21.5, NAN, NAN), False, 2, 1200),
            Score("own", "bits_per_byte", e(1.25, NAN, NAN), False, 2, 1200),
        )
        return Stand("evaluate", scores=scores)

    def test_verdict(self) -> None:
        assert said(self.result()) == "acc 0.543 [0.425, 0.660] on wnli, word_perplexity 21.50 on own"

    def test_table(self) -> None:
        table = beside(self.result())
        assert (table.heads, table.columns) == (("model", "task", "measure"), ("value", "shots", "examples"))
        assert shown(table)[:2] == [
            ("a", "wnli", "acc", "0.543 [0.425, 0.660]", "0", "70"),
            ("a", "own", "word_perplexity", "21.50", "2", "1,200"),
        ]


def test_every_kind_has_its_test_here() -> None:
    tested = {
        "TestFidelity", "TestPlausibility", "TestSanity", "TestPosition", "TestPrompts", "TestWords", "TestStability",
        "TestStabilityTable", "TestBound", "TestSnr", "TestRetrieval", "TestLoss", "TestLensFit", "TestOverflow",
        "TestInsertion", "TestInfluence", "TestEffect", "TestTrajectory", "TestHeatmap", "TestAttention", "TestExplain",
        "TestKnockout", "TestPatch", "TestAblate", "TestSteer", "TestPoison", "TestHeatmapData", "TestPair",
        "TestEvaluate",
    }  # fmt: skip
    assert tested <= set(globals())
    assert {"Test" + kind.title().replace("-", "") for kind in register.kinds()} == tested
