"""Frames, tables and lines of hand-made results, whose numbers are distinct at every place."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ssmscope.attacks.effect import result as effect_views
from ssmscope.attacks.insertion.result import InsertionCurve, InsertionSweep, Place, curve_table, place_name
from ssmscope.core.bootstrap import Estimate
from ssmscope.errors import InputError
from ssmscope.interp.explain.result import Attribution, ExplainedText, Explanation, doubt, strongest
from ssmscope.interp.heatmap import text_result as views
from ssmscope.interp.heatmap.scored_text import ScoredText
from ssmscope.interp.heatmap.text_result import SelectionHeatmap
from ssmscope.probes.evaluate.result import Benchmarks, TaskScore
from ssmscope.probes.retrieval.result import Cell, Ratio, Retrieval
from ssmscope.probes.snr.measure import LayerDifference, LayerSNR, SNRCurve, SNRDifference
from ssmscope.probes.snr.result import LensedModel, NeedleSNR
from ssmscope.render.blocks import Prose

NAN = math.nan


def counter() -> Any:
    """Return a function that gives an estimate of another value, with another interval, at each call."""
    numbers = itertools.count(1)

    def next_one() -> Estimate:
        value = next(numbers) / 1024
        return Estimate(value, value - 1 / 4096, value + 1 / 2048)

    return next_one


def prose(result: Any) -> list[str]:
    return [block.text for block in result.blocks() if isinstance(block, Prose)]


class TestNeedles:
    FIELDS = ("needle", "distractor", "ratio", "log_ratio", "candidate", "beats", "rank", "leads")

    def result(self, chances: tuple[float, float] = (0.25, NAN), models: int = 2) -> NeedleSNR:
        made = counter()

        def layers(count: int) -> tuple[LayerSNR, ...]:
            return tuple(
                LayerSNR(at, at / (count - 1), **{name: made() for name in self.FIELDS}) for at in range(count)
            )

        names = ("m", "n")[:models]
        curves = tuple(
            SNRCurve(name, task, length, 7, 30.0, chance, layers(3), made())
            for length in (100, 2000)
            for task, chance in zip(("all", "qa1"), chances)
            for name in names
        )
        apart = tuple(LayerDifference(at, at / 2, made(), made()) for at in range(3))
        differences = (
            SNRDifference("m", "n", "qa1", 100, apart, made()),
            SNRDifference("m", "n", "all", 100, apart, made()),
        )
        lensed = tuple(LensedModel(name, f"lens of {name}", 2) for name in names)
        about = {"model": ", ".join(names)}
        return NeedleSNR(about, lensed, "tokens", curves, differences if models == 2 else (), ("one", "two"))

    def test_frame(self) -> None:
        result = self.result()
        frame = result.to_frame()
        names = ("needle", "distractor", "ratio", "log_ratio", "candidate", "beats", "rank", "leads")
        columns = [column for name in names for column in (name, f"{name}_low", f"{name}_high")]
        head = ["part", "model", "lens", "task", "length", "examples", "layer", "depth"]
        assert list(frame) == [*head, *columns] and len(frame) == 8 * 3 + 2 * 3
        for row, (curve, layer) in zip(
            frame.to_dict("records"), [(one, layer) for one in result.curves for layer in one.layers]
        ):
            found = [row[name] for name in head]
            assert found == [
                "curve",
                curve.model,
                f"lens of {curve.model}",
                curve.task,
                curve.length,
                7,
                layer.layer,
                layer.depth,
            ]
            for name in names:
                one = getattr(layer, name)
                assert [row[name], row[f"{name}_low"], row[f"{name}_high"]] == [one.value, one.low, one.high]
        apart = frame[frame.part == "difference"]
        assert apart.model.tolist() == ["m − n"] * 6 and apart.task.tolist() == ["qa1"] * 3 + ["all"] * 3
        assert apart.needle.tolist()[:3] == [each.needle.value for each in result.differences[0].layers]
        assert apart.log_ratio.tolist()[3:] == [each.log_ratio.value for each in result.differences[1].layers]
        assert apart.lens.isna().all() and apart["rank"].isna().all() and apart.length.tolist() == [100] * 6

    def test_answers_have_the_columns_of_distractors_where_any_task_has_some(self) -> None:
        result = self.result()
        answers = [table for table in result.tables() if table.heads == ("task", "model")]
        assert len(answers) == 2 and answers[0].title == "The models' own answers"
        assert self.result(models=1).tables()[1].title == "The model's own answer"
        assert answers[0].columns == ("accuracy", "ln(needle / distractor)", "among candidates", "chance")
        assert [labels for labels, _ in answers[0].rows] == [("all", "m"), ("all", "n"), ("qa1", "m"), ("qa1", "n")]
        for (_, own), curve in zip(answers[1].rows, result.curves[4:]):
            last = curve.layers[-1]
            assert [cell.found.value for cell in own[:3]] == [
                last.leads.value,
                last.log_ratio.value,
                last.candidate.value,
            ]
        none = [table for table in self.result((NAN, NAN)).tables() if table.heads == ("task", "model")]
        assert none[0].columns == ("accuracy",)

    def test_layers_of_every_model_and_their_difference(self) -> None:
        result = self.result()
        first, _, second, _ = result.tables()
        assert first.title == "Needle probability, contexts of 100 tokens" and first.columns == ("m", "n", "difference")
        assert second.title == "Needle probability, contexts of 2,000 tokens" and second.columns == ("m", "n")
        assert [label for (label,), _ in first.rows] == ["0", "1", "model"]
        for at, (_, own) in enumerate(first.rows):
            expected = [*(result.curve(name).layers[at] for name in "mn"), result.differences[1].layers[at]]
            assert [cell.found.value for cell in own] == [one.needle.value for one in expected]
        assert prose(result)[-2:] == ["Note: one.", "Note: two."] and prose(result)[1:3] == [
            "m: lens of m, 2 layers",
            "n: lens of n, 2 layers",
        ]

    def test_headline_says_from_which_layer_on_half_is_known(self) -> None:
        result = self.result(models=1)
        for needles, layer in (((0.1, 0.3, 0.5), 1), ((0.3, 0.1, 0.5), 2), ((0.25, 0.3, 0.5), 0), ((0.5, 0.5, 0.5), 0)):
            curve = result.curves[0]
            layers = tuple(
                replace(each, needle=Estimate(value, NAN, NAN)) for each, value in zip(curve.layers, needles)
            )
            found = replace(result, curves=(replace(curve, layers=layers), *result.curves[1:]))
            told = f"0.500 at 100 tokens, half of it from layer {layer} of 2 on"
            assert found.headline == f"Needle probability of m: {told}"
        alone = replace(result, curves=result.curves[:2])
        assert " at 100" not in alone.headline and ": m 0." not in alone.headline
        assert "; n 0." in self.result().headline and self.result().headline.startswith("Needle probability: m 0.")
        with pytest.raises(InputError, match="there is no curve m/qa9/100; there are m/all/100, m/qa1/100, m/all/2000"):
            result.curve(task="qa9")
        assert result.curve(length=2000, task="qa1") is result.curves[3]


class TestRetrieval:
    def result(self) -> Retrieval:
        made = counter()
        grid = [("qa1", "qa2"), (10, 20, 40)]
        of_cells = tuple(
            tuple(tuple(Cell(float(next(steps)), made(), made(), made()) for _ in grid[1]) for _ in grid[0])
            for steps in (itertools.count(start) for start in (100, 200, 300))
        )
        values = iter([*np.arange(12) / 8 + 0.25])
        ratios = tuple(
            tuple(
                tuple(Ratio(Estimate(v := float(next(values)), v - 0.1, v + 0.1), v / 100) for _ in grid[1])
                for _ in grid[0]
            )
            for _ in range(2)
        )
        right = np.zeros((3, 2, 3, 4), bool)
        right[1, 0, 2, 0] = right[2, :, 0, :2] = True
        provenance = {"model": "x, y, z", "data": {"split": "test"}, "options": {"filler": "pg"}}
        return Retrieval(
            provenance, ("x", "y", "z"), *grid, (0.25, 0.5), of_cells, ratios, right, right.astype("f4"), ()
        )

    def test_frame(self) -> None:
        result = self.result()
        found = result.to_frame().to_dict("records")
        places = list(itertools.product(range(3), range(2), range(3)))
        assert [(row["model"], row["task"], row["length"]) for row in found] == [
            ("xyz"[model], ("qa1", "qa2")[task], (10, 20, 40)[length]) for model, task, length in places
        ]
        for row, (model, task, length) in zip(found, places):
            cell = result.cells[model][task][length]
            assert (row["tokens"], row["examples"], row["chance"]) == (cell.tokens, 4, (0.25, 0.5)[task])
            for name in ("accuracy", "constrained", "log_probability"):
                one = getattr(cell, name)
                assert [row[name], row[f"{name}_low"], row[f"{name}_high"]] == [one.value, one.low, one.high]
            if model == 0:
                assert math.isnan(row["ratio"]) and math.isnan(row["p"]) and not row["differs"]
            else:
                ratio = result.ratios[model - 1][task][length]
                assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == (
                    ratio.value.value,
                    ratio.value.low,
                    ratio.value.high,
                )
                assert (row["p"], row["differs"]) == (ratio.p, ratio.differs)

    def test_a_ratio_differs_where_the_interval_and_the_test_agree(self) -> None:
        for low, high, p, differs in (
            (1.1, 2.0, 0.04, True),
            (0.5, 0.9, 0.04, True),
            (1.0, 2.0, 0.04, False),
            (0.5, 1.0, 0.04, False),
            (1.1, 2.0, 0.05, False),
        ):
            one = Ratio(Estimate(1.5, low, high), p)
            assert one.differs == differs and one.written == "1.50" + "*" * differs
        assert Ratio(Estimate(99.99, 0.5, 200), 1.0).written == "99.99"
        assert Ratio(Estimate(100.4, 0.5, 200), 1.0).written == "100"

    def test_tables_are_of_every_model_in_order(self) -> None:
        result = self.result()
        titles = [table.title for table in result.tables()]
        assert titles[:3] == [f"accuracy of {name}" for name in "xyz"]
        assert titles[3:5] == [f"accuracy of x / accuracy of {name} (* differs)" for name in "yz"]
        tables = result.tables()
        for model in range(3):
            assert tables[model].columns == ("10", "20", "40", "chance")
            for task, (labels, own) in enumerate(tables[model].rows):
                assert labels == (("qa1", "qa2")[task],)
                assert [cell.found.value for cell in own[:3]] == [
                    one.accuracy.value for one in result.cells[model][task]
                ]
        assert [cell.text for cell in tables[4].rows[1][1]] == [one.written for one in result.ratios[1][1]]
        value = result.ratios[1][1][2].value
        assert tables[4].rows[1][1][2].interval == f"[{value.low:.2f}, {value.high:.2f}]"
        assert result.verdict(2) == "accuracy 0.500 at 10 tokens and 0.000 at 40 tokens, mean of 2 tasks"
        assert result.headline == (
            "Retrieval, accuracy on 2 tasks by context tokens: x 0.000 at 10 and 0.000 at 40; y 0.000 at 10 and "
            "0.125 at 40; z 0.500 at 10 and 0.000 at 40"
        )


class TestInsertion:
    def result(self, curves: int = 2, odds: bool = True) -> InsertionSweep:
        made = counter()

        def place(name: str, share: float | None) -> Place:
            names = ("accuracy", "drop", "flipped", "log_odds_change", "worst_here")[: 5 if odds else 3]
            return Place(name, share, **{each: made() for each in names})

        every = tuple(
            InsertionCurve(
                f"phrase {at}", (place("before", None), place("50 %", 0.5)), (1, 0), (0,) * odds, made(), made()
            )
            for at in range(curves)
        )
        return InsertionSweep(
            {"model": "m", "data": {"name": "sst2", "split": "test", "examples": 4}},
            clean=made(),
            clean_log_odds=made() if odds else None,
            curves=every,
            worst=made(),
            worst_drop=made(),
        )

    @pytest.mark.parametrize(("curves", "odds"), [(2, True), (1, True), (2, False)])
    def test_frame(self, curves: int, odds: bool) -> None:
        result = self.result(curves, odds)
        frame = result.to_frame()
        numbers = ["accuracy", "drop", "flipped", *["log_odds", "worst_here"] * odds]
        ends = [column for name in numbers for column in (name, f"{name}_low", f"{name}_high")]
        assert list(frame) == ["model", "part", "phrase", "place", "share", *ends]
        expected: list[tuple[Any, ...]] = [
            ("clean", None, None, None, result.clean, None, None, result.clean_log_odds, None)
        ]
        for curve in result.curves:
            for one in curve.places:
                own = (one.accuracy, one.drop.times(100), one.flipped, one.log_odds_change, one.worst_here)
                expected.append(("place", curve.phrase, one.name, one.share, *own))
            expected.append(
                ("worst", curve.phrase, "any place", None, curve.worst, curve.worst_drop.times(100), None, None, None)
            )
        if curves > 1:
            worst = (result.worst, result.worst_drop.times(100), None, None, None)
            expected.append(("worst", "any phrase", "any place", None, *worst))
        assert len(frame) == len(expected)
        for row, (part, phrase, name, share, *own) in zip(frame.to_dict("records"), expected):
            for found, wanted in zip(
                (row["part"], row["phrase"], row["place"], row["share"]), (part, phrase, name, share)
            ):
                assert found == wanted or (wanted is None and found != found) or found is wanted
            for column, one in zip(numbers, own):
                values = [row[column], row[f"{column}_low"], row[f"{column}_high"]]
                if one is None:
                    assert all(map(math.isnan, values)), column
                else:
                    assert values == [one.value, one.low, one.high], column

    def test_what_is_said_below_the_tables(self) -> None:
        several = f"The worst phrase and place of each example: accuracy {self.result().worst}."
        assert several in prose(self.result())
        assert not any(line.startswith("The worst phrase") for line in prose(self.result(1)))
        assert [place_name(share) for share in (0.0, 0.5, 1 / 3, 1.0)] == ["0 %", "50 %", "33.33 %", "100 %"]
        many = self.result(7)
        assert len(many.shown) == 6 and many.shown == many.curves[:6]  # the lowest accuracies, in their order
        turned = replace(many, curves=many.curves[::-1])
        assert turned.shown == turned.curves[1:] and len(self.result(6).shown) == 6
        assert any("6 of 7 phrases" in line for line in prose(many))
        assert not any("phrases with the lowest" in line for line in prose(self.result(6)))

    def test_table_of_a_phrase(self) -> None:
        result = self.result()
        curve = result.curves[1]
        table = curve_table(curve, result.clean)
        assert (
            table.columns == ("accuracy", "drop in %", "flipped", "change of log-odds") and table.title == "“phrase 1”"
        )
        assert [labels for labels, _ in table.rows] == [("clean",), ("before",), ("50 %",), ("worst of each text",)]
        own = [[cell.found.value if cell.found is not None else None for cell in row] for _, row in table.rows]
        assert own[0][0] == result.clean.value and own[3][:2] == [curve.worst.value, 100 * curve.worst_drop.value]
        for one, row in zip(curve.places, own[1:3]):
            assert one.log_odds_change is not None
            assert row == [one.accuracy.value, 100 * one.drop.value, one.flipped.value, one.log_odds_change.value]
        assert table.note == (
            "The log-odds of the true class are most often lowest at before, "
            f"for {curve.places[0].worst_here} of the texts."
        )


class TestHeatmap:
    def text(self, *layers: list[float], lives: Any = None, **more: Any) -> ScoredText:
        scores = np.array(layers, np.float32)
        tokens = (" a", " b", " c")
        given = dict(
            rationale=(1,), answer="yes", probability=0.5, half_lives=None if lives is None else np.array(lives)
        )
        return ScoredText(tokens, (0, 1, 2), scores, scores.mean(0), **{**given, **more})

    def result(self, *texts: ScoredText, **more: Any) -> SelectionHeatmap:
        given = dict(score="survival", layers=tuple(range(len(texts[0].scores))), size=2, by_layer=True)
        return SelectionHeatmap({"model": "own"}, texts, **{**given, **more})

    def test_scores_are_written_in_the_unit_of_their_kind(self) -> None:
        one = self.text([0.1, 0.2, 0.7])
        found = self.result(one)
        assert [found.written(score) for score in (0.0, 0.0994, 0.1, 0.256)] == ["0.0 %", "9.9 %", "10 %", "26 %"]
        assert [self.result(one, score="retention").written(score) for score in (0.0994, 0.5)] == ["0.099", "0.500"]
        shown = self.result(one, contrast="sst2")
        assert [shown.written(score) for score in (-1.26, 0.0, 2.0)] == ["−1.3", "+0.0", "+2.0"]

    def test_the_verdict_names_the_score_and_its_place(self) -> None:
        one = self.text([0.125, 0.5, 0.375])
        for more, said in (
            ({}, "“b” 50 % of the states at the end (layer 0)"),
            (dict(at=2), "“b” 50 % of the states after token 2 (layer 0)"),
            (dict(contrast="sst2"), "most above their own average over sst2: “b” +0.5 (layer 0)"),
            (dict(score="write"), "highest write: “b” 0.500 (layer 0)"),
        ):
            assert self.result(one, **more).verdict() == said
        nothing = self.text([0.125, 0.5, 0.375], rationale=())
        assert self.result(nothing, nothing, score="write").verdict() == (
            "text 0: no word stands out; text 1: no word stands out (write, layer 0)"
        )

    def test_half_lives_of_up_to_three_layers_are_said(self) -> None:
        row = [0.2, 0.5, 0.3]
        for lives, said in (
            ([[2.0, 2.0, 2.0]], "; half of what is written is left after 2 tokens"),
            ([[1.0] * 3, [2.0] * 3], "; half of what is written is left after 1 and 2 tokens"),
            ([[1.0] * 3, [2.0] * 3, [3.0] * 3], "; half of what is written is left after 1, 2 and 3 tokens"),
            ([[1.0] * 3, [2.0] * 3, [3.0] * 3, [3.0] * 3], " of the states at the end ("),
            ([[2.0] * 3] * 4, "; half of what is written is left after 2 tokens"),
            (None, " of the states at the end ("),
        ):
            layers = 1 if lives is None else len(lives)
            verdict = self.result(self.text(*[row] * layers, lives=lives)).verdict()
            assert said in verdict and ("half of" in said) == ("half of" in verdict), verdict

    def test_the_strongest_are_listed_text_by_text_the_average_first(self) -> None:
        first = self.text([0.2, 0.5, 0.3], [0.4, 0.4, 0.2], standing=((1,), (0,)), lives=[[1.0] * 3, [2.0] * 3])
        second = self.text(
            [0.6, 0.3, 0.1], [0.1, 0.2, 0.7], standing=((0,), (2,)), rationale=(2,), flat=(False, True, False)
        )
        lines = list(views.strongest(self.result(first, second)))
        found = [
            (*labels, *(cell.text for cell in own.values()))
            for labels, own in ((line.labels, line.cells) for line in lines)
        ]
        assert [each[:3] for each in found] == [
            ("0", "mean", "b 45 %"),
            ("0", "layer 0", "b 50 %"),
            ("0", "layer 1", "a 40 %"),
            ("1", "mean", "c 40 %"),
            ("1", "layer 0", "a 60 %"),
            ("1", "layer 1", "c 70 %"),
        ]
        assert [each[3] for each in found[1:3]] == ["1", "2"] and len(found[0]) == 4 and len(found[1]) == 5

    def test_definitions_say_what_a_contrast_is_of(self) -> None:
        one = self.text([0.1, 0.2, 0.7])
        of = [views.definitions(self.result(one, contrast="sst2", score=score)) for score in ("survival", "retention")]
        assert any(line.startswith("z-scores of the logarithm of a token's share") for line in of[0])
        assert any(line.startswith("z-scores of scores:") for line in of[1])
        assert not any(line.startswith("Survival") for line in of[1]) and of[0][0].startswith("Survival")
        deep = self.text([0.1, 0.2, 0.7], [0.2, 0.2, 0.6])
        for result, said in (
            (self.result(deep), True),
            (self.result(one), False),
            (self.result(deep, score="retention"), False),
            (self.result(deep, through=True), False),
        ):
            assert any(line.startswith("Earlier layers have mixed") for line in views.definitions(result)) == said
        assert any(line.startswith("Followed through") for line in views.definitions(self.result(deep, through=True)))
        assert ("Half-life" in views.definitions(self.result(self.text([0.1, 0.2, 0.7], lives=[[1.0] * 3])))[0]) != (
            "Half-life" in views.definitions(self.result(one))[0]
        )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(converged=None, delta=3.0), ""),
        (dict(converged=True, delta=3.0), ""),
        (dict(converged=False, delta=None), ""),
        (dict(converged=False, delta=0.256), "misses 25.6%"),
        (dict(converged=False, delta=9.99), "misses 999.0%"),
        (dict(converged=False, delta=10.0), "misses 10×"),
        (dict(converged=False, delta=3.0, error=0.125), "not converged, ±12.5%"),
        (dict(converged=False, delta=3.0, error=math.inf), "convergence not checked"),
    ],
)
def test_what_is_doubtful_of_an_explanation(fields: dict[str, Any], said: str) -> None:
    assert doubt(Attribution("ig", np.zeros(2, np.float32), steps=4, **fields)) == said


def test_remarks_on_a_change() -> None:
    def result(first: int | None, spread: Any, **more: Any) -> Any:
        sides = {name: SimpleNamespace(text=SimpleNamespace(answer="yes")) for name in ("clean", "corrupted")}
        given = dict(state_cosine=np.array([0.5, NAN]), by_layer=False, layers=(0, 1), kept=0.25)
        return SimpleNamespace(**{**sides, **given, "first_changed": first, "spreads": [None, spread], **more})

    head = SimpleNamespace(first=2, peak_at=7, remains=0.8)
    assert list(effect_views.remarks(result(2, head))) == [
        "The texts differ from token 2 on. The head's input differs most at token 7; 80 % of that distance is left at "
        "the last token of both texts."
    ]
    assert list(effect_views.remarks(result(None, head))) == ["The texts have the same tokens."]
    same = SimpleNamespace(first=None, peak_at=7, remains=NAN)
    assert list(effect_views.remarks(result(2, same))) == [
        "The texts differ from token 2 on; at the tokens that both have, the head's input is the same."
    ]
    turned = result(None, head, corrupted=SimpleNamespace(text=SimpleNamespace(answer="no")))
    assert list(effect_views.remarks(turned))[-1] == "The clean text's answer has p = 0.250 on the corrupted text."
    assert list(effect_views.remarks(result(None, head, state_cosine=np.array([NAN, NAN]))))[0].startswith(
        "No layer has"
    )
    for layers, by_layer, said in ((8, False, False), (9, False, True), (9, True, False)):
        found = list(effect_views.remarks(result(None, head, layers=tuple(range(layers)), by_layer=by_layer)))
        assert any(line.startswith(f"8 of {layers} layers") for line in found) == said


def test_explanations_are_listed_text_by_text_and_method_by_method() -> None:
    def text(*scores: list[float], words: tuple[int | None, ...] = (0, 1, 2)) -> ExplainedText:
        made = tuple(
            Attribution(name, np.array(row, np.float32), delta, 4, converged)
            for name, row, delta, converged in zip(("ig", "self-retention"), scores, (0.5, None), (False, None))
        )
        return ExplainedText(("a", " b", " c"), words, "yes", 0.5, "yes", 2.5, made)

    first = text([0.5, -0.25, 0.75], [0.125, 0.5, 0.25])
    second = text([-0.5, -0.75, 0.0], [0.75, 0.25, 0.5], words=(None, 0, 1))
    result = Explanation({"model": "own"}, (first, second), ("ig", "self-retention"), 2)
    found = [(line.labels, {name: cell.text for name, cell in line.cells.items()}) for line in strongest(result)]
    assert [labels for labels, _ in found] == [(at, name) for at in "01" for name in ("ig", "self-retention")]
    missed = "misses 50.0% of f(x) − f(baseline)"
    assert found[0][1] == {"highest scores": "c 0.750 · a 0.500", "strongest against": "b −0.250", "error": missed}
    assert found[1][1] == {"highest scores": "b 0.500 · c 0.250", "strongest against": ""}
    assert found[2][1]["highest scores"] == "none" and found[2][1]["strongest against"] == "b −0.750"
    assert found[2][1]["special tokens"].startswith("a −0.500")
    assert first.top(first.attributions[0], 1) == [2] and second.against(second.attributions[1], 3) == []
    compared = [line.cells for line in strongest(result, "x")]
    assert [cells["relative error of the sum"].value for cells in compared] == ["0.5000", "–", "0.5000", "–"]
    assert [line.labels for line in strongest(result, "x")][1] == ("x", "0", "self-retention")


def test_scores_of_benchmarks() -> None:
    made = counter()
    scores = (
        TaskScore("a", "acc", made(), True, 5, 100),
        TaskScore("a", "norm", replace(made(), low=NAN, high=NAN), True, 0, 100),
        TaskScore("b", "ppl", Estimate(12.345678, 12.0, 12.5), False, 0, 0),
    )
    result = Benchmarks({"model": "own", "versions": {"lm-eval": "0.4"}}, scores)
    (table,) = result.tables()
    assert [(*labels, *(cell.value for cell in own)) for labels, own in table.rows] == [
        ("a", "acc", "0.001", "5", "100"),
        ("a", "norm", "0.002", "0", "100"),
        ("b", "ppl", "12.35", "0", "–"),
    ]
    assert result.headline == "Evaluation of own: acc 0.001 on a, ppl 12.35 on b"
    panels = [
        (axes.get_xlabel(), [label.get_text() for label in axes.get_yticklabels()]) for axes in result.figure().axes
    ]
    assert panels == [("acc", ["a"]), ("norm", ["a"]), ("ppl", ["b"])]
    assert prose(result)[-1].endswith("A score without a standard error has no interval.")
    assert not prose(replace(result, scores=scores[::2]))[-1].endswith("has no interval.")
    assert result.to_frame().drop(columns="model").values.tolist()[2] == [
        "b",
        "ppl",
        12.345678,
        12.0,
        12.5,
        False,
        0,
        0,
    ]
