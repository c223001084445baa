"""Verdicts of probes in a report, number by number: the summary's line, and the comparison table."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from stand_ins import INTERVALS, NAN, Stand, beside, e, said, shown

from ssmscope.probes.evaluate.result import TaskScore
from ssmscope.probes.parity.result import Compared, Parity
from ssmscope.probes.precision.result import Arm, Precision
from ssmscope.probes.states.result import StateNorms


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
            bins = tuple(e(part, part, part) for part in parts)
            return SimpleNamespace(mean=e(mean, mean - 0.5, mean + 0.5), bins=bins, slope=e(math.nan))

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
        assert table.columns == ("bits a token ↓", "at 1–16 ↓", "at 17–2,048 ↓")
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
            of_own_tokens=False,
        )
        result = Stand("influence", reaches=(reach,), recent=8, unit="tokens", lengths=np.array([50, 60, 70]))
        assert said(result) == "decay length 81, 90 % of it within 37 tokens"
        reach.of_own_tokens, contexts[0.5] = True, 10.0
        assert said(result) == "half of it in the last 3 of 60 tokens, 90 % in the last 30"
        table = beside(result)
        assert table.heads == ("model", "of")
        assert table.columns == ("rate λ", "decay length", "share of the last 8", "90 % held within")
        cells = ("0.01235 [0.01000, 0.01500]", "81 [70, 90]", "0.625 [0.500, 0.750]", "30")
        assert shown(table) == [("a", "output", *cells)] and "Held: of the influence of the text's own" in table.note


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


class TestEvaluate:
    def result(self) -> Stand:
        scores = (
            TaskScore("wnli", "acc", e(0.543, 0.425, 0.66), True, 0, 70),
            TaskScore("own", "word_perplexity", e(21.5, NAN, NAN), False, 2, 1200),
            TaskScore("own", "bits_per_byte", e(1.25, NAN, NAN), False, 2, 1200),
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


class TestParity:
    def result(self, fault: str, *errors: float) -> Stand:
        tensors = tuple(
            Compared(f"layers.{at}.state.0", error, 0.25, int(error > 0.25), 3, 0, 7, "the")
            for at, error in enumerate(errors)
        )
        return Stand("parity", file="a.safetensors", ran_in="float32", tensors=tensors, fault=fault)

    def headline(self, *given: Any) -> str:
        result = self.result(*given)
        return Parity.headline.fget(result)

    def test_headline(self) -> None:
        same = "Parity of own: a.safetensors is of the same model: 2 tensors agree, with at most 0.500 of the error"
        assert self.headline("", 0.125, 0.0).startswith(same)
        assert self.headline("D is forgotten", 0.125, 0.5) == (
            "Parity of own: a.safetensors first differs in the state of layer 1, after token 7 'the' of text 0, "
            "by 0.500 of "
            "its size, 2 × what float32 allows; likely, D is forgotten"
        )
        assert self.headline("", 0.5).endswith("no known fault explains it")


class TestPrecision:
    def headline(self, **changes: float) -> str:
        arms = tuple(
            Arm(name, bits, 1, False, e(changes[name], changes[name], changes[name]), e(0.0), e(0.5), e(0.0), ())
            for name, bits in (("bfloat16", 16), ("int8", 8), ("int4", 4))
        )
        return Precision.headline.fget(Stand("precision", arms=arms))

    def test_headline(self) -> None:
        assert self.headline(bfloat16=0.0, int8=0.001, int4=0.5).startswith(
            "Precision of own: the state may be kept in int8 ("
        )
        assert ", but int4 costs" in self.headline(bfloat16=0.0, int8=0.001, int4=0.5)
        assert "every rounding may cost" in self.headline(bfloat16=0.5, int8=1.0, int4=2.0)


class TestStates:
    def test_headline(self) -> None:
        found = Stand(
            "states",
            rows=((0, 2, "a"), (0, 4, "film")),
            names=("layers.0.state.0", "layers.0.conv", "layers.3.state.0"),
            shapes=((2, 3), (4,), (2, 5)),
            norms=np.array([[1.0, 9.0, 2.0], [0.5, 9.0, 4.0]]),
        )
        assert StateNorms.headline.fget(found) == (
            "States of own: 20 numbers in 3 tensors after each token; the largest norm is 4, in layer 3 after "
            "token 4 'film'"
        )
