"""Verdicts on interpretations in a report, number by number: the summary's line, and the comparison table."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from stand_ins import BEST, INTERVALS, NAN, Stand, beside, e, found, said, shown

from ssmscope import load, patch
from ssmscope.api import analyses as registry
from ssmscope.api.results import Result
from ssmscope.interp.attention.maps import MarkedShare
from ssmscope.interp.attention.result import DataAttention
from ssmscope.interp.generate.result import SourceMap, Writing, WrittenText
from ssmscope.interp.heatmap.scored_text import ScoredText
from ssmscope.interp.heatmap.text_result import SelectionHeatmap
from ssmscope.render.table import MAX_COMPARED_ROWS
from ssmscope.reports.grouping import verdict


class TestFidelity:
    def result(self, shift: float = 0.0) -> Stand:
        numbers = {
            ("ig", "delta"): e(0.31, 0.29, 0.33), ("self-retention", "delta"): e(0.42 + shift, 0.4, 0.44),
            ("random", "delta"): e(0.01, -0.02, 0.04),
            ("ig", "morf"): e(0.2, 0.1, 0.3), ("self-retention", "morf"): e(0.25, 0.2, 0.3),
            ("random", "morf"): e(0.5, 0.4, 0.6),
        }  # fmt: skip
        rows, measures = ("ig", "self-retention", "random"), ("delta", "morf")
        return Stand(
            "fidelity",
            methods=rows[:-1],
            rows=rows,
            measures=measures,
            data="sst2",
            estimates=np.array([[dataclasses.astuple(numbers[row, measure]) for measure in measures] for row in rows]),
            best=lambda measure: ("self-retention",),
            estimate=lambda method, measure="delta": numbers[method, measure],
            difference=lambda method, other: e(0.11, 0.05, 0.17),
        )

    def test_verdict(self) -> None:
        assert said(self.result()) == "ΔA 0.420 [0.400, 0.440] of self-retention, the best of 2"
        both = self.result()
        both.best = lambda measure: ("ig", "self-retention") if measure == "delta" else ()
        both.difference = lambda method, other: e(0.11, -0.01, 0.23)
        assert said(both) == "ΔA 0.310 [0.290, 0.330] of ig and self-retention, not clearly the best of 2"

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
        told = "ΔA depends on the scale of each model's logits: compare methods by it, not models."
        assert table.note == f"{told} {BEST} {INTERVALS}"


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
            "[CLS] 30 %; half-life in tokens: beyond the text (layer 3)"
        )
        assert said(self.result(first, score="retention")) == "highest retention: “so-so” 0.250, “film” 0.100 (layer 3)"
        nothing = self.text([0.2] * 5, ())
        assert said(self.result(nothing)) == "no word stands out; [CLS] 20 % (survival, layer 3)"
        flat = dataclasses.replace(nothing, flat=(True, True))
        assert said(self.result(flat)).startswith("nothing stands out: the spread over tokens is noise")
        four = self.result(first, nothing, first, first)
        assert said(four) == (
            "text 0: “so-so” 50 %, “film” 10 %; text 1: no word stands out; text 2: “so-so” 50 %, "
            "“film” 10 %; 1 more text (survival, layer 3)"
        )
        images = self.result(dataclasses.replace(first, pixels=np.zeros((2, 2, 1), np.float32)))
        assert said(images) == "survival of 1 image, layer 3: half of it lies on 40 % of the pixels"

    def test_table(self) -> None:
        first = self.text([0.05, 0.1, 0.3, 0.2, 0.3], (2, 3, 1))
        table = beside(self.result(first, self.text([0.2] * 5, (), answer="negative", p=0.6)))
        assert (table.heads, table.columns) == (("model", "text"), ("answer", "p", "score", "stands out"))
        assert shown(table) == [
            ("a", "0", "positive", "0.750", "survival", "so-so 50 % · film 10 %"),
            ("a", "1", "negative", "0.600", "survival", "nothing"),
        ]
        assert table.note == ""
        many = beside(self.result(*[first] * (MAX_COMPARED_ROWS + 1)))
        assert (
            len(many.rows) == MAX_COMPARED_ROWS
            and many.remarks == f"{MAX_COMPARED_ROWS} of {MAX_COMPARED_ROWS + 1} rows."
        )


class TestAttention:
    def text(self, *distances: float) -> Any:
        maps = [SimpleNamespace(readouts=SimpleNamespace(distance=one)) for one in distances]
        return SimpleNamespace(maps=maps, bidirectional=False)

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
            SimpleNamespace(method="ig", scores=np.array([0.25, -1.5, 0.125]), delta=0.0123, signed=True, kind=None),
            SimpleNamespace(
                method="self-retention", scores=np.array([1.0, 2.0, 3.0]), delta=None, signed=False, kind=None
            ),
        )

        def text(number: int) -> Any:
            return SimpleNamespace(
                tokens=tokens,
                attributions=attributions,
                target="positive",
                value=0.5 + number,
                special=np.zeros(3, dtype=bool),
                pixels=None,
                named=lambda each, at: tokens[at],
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
        line = "positive by “a”, “film”"
        assert said(self.result([True, None, True, None])) == f"{line}; {line} (ig)"
        assert said(self.result([True, None, False, None])) == f"{line}; {line} (ig); 1 of 4 attributions incomplete"
        assert said(self.result([True], texts=1)) == f"{line} (ig)"
        assert said(self.result([True], texts=5)) == f"{line}; {line}; {line}; 2 more (ig)"

    def test_table(self) -> None:
        table = beside(self.result([True], texts=1))
        assert table.heads == ("model", "text", "method")
        assert table.columns == ("of", "f", "highest scores", "strongest against", "relative error of the sum")
        assert shown(table) == [
            ("a", "0", "ig", "positive", "0.5000", "a 0.250 · film 0.125", "good −1.50", "0.01230"),
            ("a", "0", "self-retention", "positive", "0.5000", "film 3 · good 2", "", "–"),
        ]
        many = beside(self.result([True], texts=MAX_COMPARED_ROWS // 2 + 1))
        assert (
            len(many.rows) == MAX_COMPARED_ROWS
            and many.remarks == f"{MAX_COMPARED_ROWS} of {MAX_COMPARED_ROWS + 2} rows."
        )


class TestKnockout:
    def test_both(self) -> None:
        from ssmscope.interp.knockout.result import Cut, Knockout

        cuts = (Cut(0, 1), Cut(1, 1), Cut(0, 0))
        changes = np.array([[[-0.5, -0.6, -0.4], [-0.45, -0.5, -0.4], [0.01, 0.0, 0.02]]])
        result = Stand(
            "knockout", sources=("attic",), cuts=cuts, changes=changes, probability=np.array([0.02]), answers=("yes",)
        )
        for name in ("change", "_largest"):
            setattr(result, name, getattr(Knockout, name).__get__(result))
        assert said(result) == (
            "relative change of the answer's probability of 0.02: “attic” −50.0 % [−60.0, −40.0] in all layers, "
            "most in layer 1 (−45.0 %)"
        )
        result.probability, result.answers = np.array([0.02, 0.5]), ("yes", "no")
        assert said(result).startswith("relative change of the answer's probability of each text: “attic” −50.0 % [")
        table = beside(result)
        assert (table.heads, table.columns) == (("model", "from"), ("all layers", "most in", "there"))
        changes[..., 1:], changes[0, 0, 0] = NAN, -0.0002  # of a single text there are no intervals
        assert said(result) == (
            "relative change of the answer's probability of each text: “attic” 0.0 % in all layers, most in layer 1 "
            "(−45.0 %)"
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
        curves = np.zeros((2, 3, 3, 3))
        curves[0, :, 0] = np.array([0.25, 0.255, 0.75])[:, None]
        shown = dict(units=units, harms=harms, plain=plain, curves=curves, counts=(0, 1, 2))
        return Stand("ablate", what="head", metric="loss", **shown)

    def test_both(self) -> None:
        result = self.result()
        assert said(result) == (
            "1 of 2 heads can go alone; most harm: layer 0, head 1, loss worse by 0.500 [0.250, 0.750]"
        )
        few = self.result()
        few.harms[:, 0, 1] = -0.25
        assert said(few) == "1 of 2 heads can go alone; none clearly does harm"
        assert [cell.value for cell in beside(few).rows[0][1]][2:] == ["none clearly", "0.500"]
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


class TestGenerate:
    def text(self, kept: float) -> Any:
        nothing = SourceMap("survival", np.zeros((2, 4), np.float32), signed=False)
        left = np.array([kept, 0.0, 1 - kept, 0.0], np.float32)
        shown = dict(tokens=(" a", " b", " c", " d"), words=(0, 1, 2, 3), first=2, text=" c d", maps=(nothing,))
        log_p, lives = np.array([-1.0, -2.0]), np.ones((3, 4), np.float32)
        numbers = dict(log_probabilities=log_p, entropies=np.array([0.5, 1.0]), left=left, half_lives=lives)
        return WrittenText(**shown, **numbers, ended_by="length")

    def test_both(self) -> None:
        one = Writing({"model": "own"}, (self.text(0.25),), top=3)
        assert said(one) == "writes 2 tokens at −1.50 nats a token; 0.250 of the states at the end is of the prompt"
        both = Writing({"model": "own"}, (self.text(0.25), self.text(0.75)), top=3)
        assert said(both) == "writes 4 tokens at −1.50 nats a token; 0.500 of the states at the end is of the prompt"
        assert one.headline == (
            "Writing of own: “c d”; half of what a token writes is left after 1 token; the prompt holds 25 % of the "
            "states at the end, “a” most of it"
        )
        assert both.headline == one.headline.replace("“c d”;", "“c d” and 1 more text;")
        table = beside(both)
        assert table.columns == ("written", "tokens", "nats a token", "entropy", "prompt at the end")
        assert shown(table)[1] == ("a", "1", " c d", "2", "−1.500", "0.7500", "0.7500")


class TestHeatmapData:
    def result(self, *words: tuple[str, float]) -> Stand:
        from ssmscope.interp.heatmap.words import KeptWord

        found = tuple(KeptWord(word, 9, 9, e(kept, kept - 0.25, kept + 0.25)) for word, kept in words)
        return Stand(
            "heatmap-data", score="survival", texts=1000, words=found, tenths=(), by_layer=(), groups=(), layers=(0, 1)
        )

    def test_verdict(self) -> None:
        assert said(self.result(("tears", 3.0), ("joy", 2.5), ("x", 2.0), ("the", 0.5))) == (
            "highest: “tears” 3.000 [2.750, 3.250] times an even share, then “joy”, “x”; lowest: “the” 0.500 "
            "[0.250, 0.750] (survival, mean of layers 0–1, 1,000 texts)"
        )
        assert said(self.result()) == "survival over 1,000 texts; no word occurs in enough of them"

    def test_beside(self) -> None:
        assert not beside(self.result(), self.result()).rows


class TestAttentionData:
    def test_both(self) -> None:
        maps = [
            MarkedShare(str(at), "", "mean", e(value, value - 0.1, value + 0.1)) for at, value in enumerate((0.3, 0.5))
        ]
        result = DataAttention({"model": "own"}, "block", "mean", 9, 0, 0.25, tuple(maps))
        assert said(result) == (
            "its share on the marked tokens is 0.500 [0.400, 0.600] in layer 1 to 0.300 [0.200, 0.400] in layer 0; an "
            "even share is 0.250 (block level, 9 texts)"
        )
        table = beside(result)
        assert table.columns == ("a",) and [row for (row,), _ in table.rows] == ["layer 0", "layer 1"]


class TestPair:
    def test_each_models_line_is_its_own(self) -> None:
        pair = Stand("pair", results=(Stand("bound", headline="Bound of own: a"), TestHeatmapData().result()))
        both = found(pair, ("m", "n"))
        assert verdict(both, "m") == said(pair.results[0]) and "1,000 texts" in verdict(both, "n")


def test_every_kind_that_words_its_verdict_has_its_test() -> None:
    files = Path(__file__).parent.glob("test_verdicts*.py")
    tested = {name for file in files for name in re.findall(r"^class (Test\w+):", file.read_text(), re.MULTILINE)}
    for home in set(registry.result_homes().values()):
        importlib.import_module(home)
    kinds = {kind: Result._kinds[kind] for kind in registry.result_homes()}
    own = [kind for kind, at in kinds.items() if (at.headline, at.verdict) != (Result.headline, Result.verdict)]
    assert {"Test" + kind.title().replace("-", "") for kind in own} == tested


class TestCircuit:
    def test_verdict(self) -> None:
        from ssmscope.interp.circuit.result import Circuit

        edges = dict(senders=("embedding", "layer 0"), receivers=("layer 0", "logits"), roads=("B", ""))
        scores = np.array([[-0.5, -0.75, -0.25], [-1.0, -1.25, -0.75]])
        given = dict(
            faithfulness=np.array([0.9, 0.8, 1.0]),
            random=np.array([0.25]),
            curve=np.zeros((0, 2)),
            clean=2.0,
            corrupted=-2.0,
        )
        result = Circuit(
            {"model": "own"},
            pairs=3,
            method="exact",
            nodes=(),
            **edges,
            scores=scores,
            kept=np.array([True, True]),
            **given,
        )
        assert result.headline == (
            "Circuit of own: 2 of 2 edges keep 0.900 [0.800, 1.000] of the answer (random circuits 0.250); most is "
            f"carried by {result.circuit[0].name}"
        )
        assert result.circuit[0].receiver == "logits" and said(result) in result.headline


class TestPatchPairs:
    def test_verdict(self) -> None:
        values = np.array([[[0.25, 0.125, 0.375]], [[-0.75, -1.0, -0.5]]])
        given = dict(sites=("state", "output"), layers=(0, 1), classes=("subject",), pairs=4, values=values)
        result = Stand("patch-pairs", model_name="own", **given)
        for name in ("strongest", "name"):
            setattr(result, name, getattr(result.real, name).__get__(result))
        headline = result.real.headline.fget(result)
        assert headline == "Patching of 4 pairs on own: most in output of layer 1 at subject: −0.750 [−1.000, −0.500]"
