"""Views of ablation, knockout, patching and steering, from hand-made results with distinct numbers at every place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ssmscope.api.results import Result
from ssmscope.interp.ablate.result import Ablation, Unit
from ssmscope.interp.knockout.result import Cut, Knockout
from ssmscope.interp.patch.result import Patching
from ssmscope.interp.scoring import MEASURES
from ssmscope.interp.steer.result import Steering
from ssmscope.render.blocks import Picture, Prose
from ssmscope.render.table import Table

ABOUT = {"model": "own", "data": {"name": "drawn", "split": "test", "examples": 1200, "fingerprint": "f"}}


def numbered(*shape: int) -> np.ndarray:
    """Means and their intervals, every number another one, (…, 3)."""
    means = 0.01 * np.arange(1, 1 + np.prod(shape)).reshape(shape)
    return np.stack([means, means - 0.002, means + 0.002], axis=-1)


def prose(result: Result) -> list[str]:
    return [block.text for block in result.blocks() if isinstance(block, Prose)]


def rows(result: Result) -> dict[str, list[str]]:
    """Every cell of the only table with its interval, by the row's label."""
    (table,) = [block for block in result.blocks() if isinstance(block, Table)]
    return {label: [f"{cell.value} {cell.interval}".strip() for cell in cells] for (label,), cells in table.rows}


def ends(frame: pd.DataFrame, name: str) -> np.ndarray:
    return frame[[name, f"{name}_low", f"{name}_high"]].to_numpy()


class TestAblation:
    UNITS = (Unit(0, part=0, called="kept"), Unit(0, part=1, called="subtracted"), Unit(3, head=2), Unit(4))
    HARMS = numbered(4, 3)
    HARMS[1, 1] = [-0.5, -0.75, 0.02]  # of accuracy no harm, up to what does not matter
    HARMS[3, 1] = [0.5, 0.25, 0.75]

    @pytest.fixture
    def result(self) -> Ablation:
        return Ablation(
            provenance=ABOUT,
            **dict(what="recurrence", by="mean", metric="accuracy", units=self.UNITS, plain=numbered(3)),
            **dict(harms=self.HARMS, order=(1, 0, 2, 3), counts=(0, 2, 4), curves=numbered(2, 3, 3), notes=("a note",)),
        )

    def test_what_it_says(self, result):
        assert result.headline == (
            "Ablation on own: 1 of 4 recurrences can go alone, 4 together; most harm: layer 4, accuracy worse by 0.500 "
            "[0.250, 0.750]"
        )
        harms = self.HARMS.copy()
        harms[3, 1] = [0.5, 0.0, 0.75]
        unclear = replace(result, harms=harms)
        assert unclear.verdict() == "1 of 4 recurrences can go alone; none clearly does harm"
        compared = Ablation.compare([result, unclear], [("x",), ("y",)])
        assert [(*labels, *(cell.value for cell in cells)) for labels, cells in compared.rows] == [
            ("x", "recurrences", "0.020", "1 of 4", "layer 4", "0.500"),
            ("y", "recurrences", "0.020", "1 of 4", "none clearly", "0.500"),
        ]
        assert result.verdict() == (
            "1 of 4 recurrences can go alone; most harm: layer 4, accuracy worse by 0.500 [0.250, 0.750]"
        )
        assert prose(result)[1:3] == [
            "1,200 examples of drawn (test); each of the recurrences by itself is replaced by its mean over the data. "
            "With nothing ablated: loss 0.010 [0.008, 0.012], accuracy 0.020 [0.018, 0.022], probability 0.030 [0.028, "
            "0.032].",
            "Note: a note.",
        ]

    def test_its_table_has_the_most_important_first(self, result):
        assert list(rows(result)) == ["layer 4", "layer 3, head 2", "layer 0, kept", "layer 0, subtracted"]
        assert rows(result)["layer 0, subtracted"] == [
            "0.040 [0.038, 0.042]", "−0.500 [−0.750, 0.020]", "0.060 [0.058, 0.062]", "yes",
        ]  # fmt: skip
        assert [cells[-1] for cells in rows(result).values()] == ["", "", "", "yes"]
        (table,) = result.tables()
        assert table.columns == (*MEASURES, "can go") and "interval of the accuracy lies below 0.02" in table.note

    def test_its_frames(self, result):
        frame = result.to_frame()
        for at, measure in enumerate(MEASURES):
            np.testing.assert_allclose(ends(frame, measure), self.HARMS[:, at])
        assert frame.layer.tolist() == [0, 0, 3, 4] and frame.can_go.tolist() == [False, True, False, False]
        assert frame.recurrence.fillna(-1).tolist() == [0, 1, -1, -1] and frame["head"].fillna(-1).tolist() == [
            -1,
            -1,
            2,
            -1,
        ]
        together = result.together()
        assert together.order.tolist() == ["least important first"] * 3 + ["random"] * 3
        assert together.ablated.tolist() == [0, 2, 4] * 2
        for at, measure in enumerate(MEASURES):
            np.testing.assert_allclose(ends(together, measure), numbered(2, 3, 3)[:, :, at].reshape(6, 3))
        assert [each.value for each in result.curve()] == pytest.approx(numbered(2, 3, 3)[0, :, 1, 0])
        assert [each.value for each in result.curve(1)] == pytest.approx(numbered(2, 3, 3)[1, :, 1, 0])


class TestKnockout:
    CUTS = (Cut(0, 2), Cut(0, 2, part="kept"), Cut(0, 1), Cut(1, 2), Cut(1, 1, head=3), Cut(2, 2, head=0, part="kept"))
    PROBABILITY = np.array([0.5, 0.25])
    CHANGES = numbered(2, 6)
    CHANGES[0, :, 0] = [-0.5, -0.75, 0.25, -0.375, -0.6, -0.2]
    CHANGES[1, :, 0] = [0.125, 0.0, 0.25, -0.0625, 0.3, 0.4]

    @pytest.fixture
    def result(self) -> Knockout:
        cells = (0.01 * np.arange(1, 25)).reshape(2, 2, 6)
        return Knockout(
            provenance={**ABOUT, "options": {"window": 2}},
            **dict(tokens=(("a", "b", "c"),) * 2, answers=("yes", "no"), sources=("a", "b"), target="c", by="head"),
            **dict(spans=(((0,), (0,)), ((1,), (1,))), targets=((2,), (2,)), roads="both", cuts=self.CUTS),
            **dict(probability=self.PROBABILITY, logit=np.array([3.0, 4.0]), probabilities=cells, logits=10 * cells),
            **dict(changes=self.CHANGES, attends=True),
        )

    def test_what_it_says(self, result):
        assert result.headline == (
            "Knockout of edges and the convolution to “c” on own: the answers of 2 texts change by −50.0 % without “a” "
            "in all layers; layer 1, head 3 alone carries it (−60.0 %); the answers of 2 texts change by 12.5 % "
            "without “b” in all layers; layer 2, head 0, kept alone carries it (40.0 %)"
        )
        assert prose(result)[1:] == [
            "“yes” has the probability 0.500 with nothing cut.",
            "“no” has the probability 0.250 with nothing cut.",
            "Other parts of the model also read earlier tokens; these are not cut.",
        ]
        assert result.verdict() == (
            "relative change of the answer's probability of each text: “a” −50.0 % [0.8, 1.2] in all layers, most in "
            "layer 1, head 3 (−60.0 %); “b” 12.5 % [6.8, 7.2] in all layers, most in layer 2, head 0, kept (40.0 %)"
        )  # a part in all layers is not a place
        assert result.layers == (0, 1, 2)
        many = dict(answers=("yes",) * 5, probability=np.full(5, 0.5), probabilities=np.full((5, 2, 6), 0.5))
        assert len(prose(replace(result, **many))) == 1 + 3 + 1  # of many texts the first three
        alone = replace(result, answers=("yes",), probability=np.array([0.123456]), attends=False)
        assert (
            ": “yes” falls from 0.123 to 0.010 without “a” in all layers;" in alone.headline
            and "probability of 0.123: “a”" in alone.verdict()
        )
        assert len(prose(alone)) == 2
        compared = Knockout.compare([result, alone], [("x",), ("y",)])
        assert [(*labels, *(cell.value for cell in cells)) for labels, cells in compared.rows] == [
            (name, *row)
            for name in "xy"
            for row in (
                ("a", "−50.0 %", "layer 1, head 3", "−60.0 %"),
                ("b", "12.5 %", "layer 2, head 0, kept", "40.0 %"),
            )
        ]

    def test_its_table_has_windows_and_then_the_heads_that_change_the_most(self, result):
        (table,) = result.tables()
        assert [label for (label,), _ in table.rows] == [
            "layers 0–2", "layers 0–2, kept", "layers 0–1", "layers 1–2", "layer 1, head 3", "layer 2, head 0, kept",
        ]  # fmt: skip
        assert table.columns == ("a", "b")
        (picture,) = [block for block in result.blocks() if isinstance(block, Picture)]
        assert picture.alt == result.headline and picture.draw == result.figure
        assert [[cell.value for cell in cells] for _, cells in table.rows][:4] == [
            ["−50.0 %", "12.5 %"], ["−75.0 %", "0.0 %"], ["25.0 %", "25.0 %"], ["−37.5 %", "−6.2 %"],
        ]  # fmt: skip
        assert [cell.interval for cell in table.rows[0][1]] == ["[0.800, 1.200]", "[6.800, 7.200]"]

    def test_heads_that_change_nothing_are_listed_while_there_is_room(self, result):
        changes = self.CHANGES.copy()
        changes[:, 4:, 0] = 0.0
        (table,) = replace(result, changes=changes).tables()
        assert [label for (label,), _ in table.rows][4:] == ["layer 1, head 3", "layer 2, head 0, kept"]
        cuts = (*self.CUTS[:4], *(Cut(1, 1, head=head) for head in range(14)))
        changes = numbered(2, 18)
        changes[1, 4:, 0] = -0.125 * np.arange(14)  # the largest of either source, whatever its sign
        many = replace(result, cuts=cuts, changes=changes, probabilities=np.full((2, 2, 18), 0.5))
        labels = [label for (label,), _ in many.tables()[0].rows]
        assert labels[4:] == [f"layer 1, head {head}" for head in range(13, 1, -1)]
        assert len(replace(many, by="layer").tables()[0].rows) == 4

    def test_long_names_are_cut(self, result):
        for length, said in ((30, "x" * 30), (31, "x" * 14 + "…" + "x" * 15)):
            assert f" to “{said}” on own" in replace(result, target="x" * length).headline
        for length, said in ((20, "x" * 20), (21, "x" * 9 + "…" + "x" * 10)):
            assert f": “{said}” −50.0 %" in replace(result, sources=("x" * length, "b")).verdict()

    def test_its_frame(self, result):
        frame = result.to_frame()
        assert len(frame) == 24 and frame.text.tolist() == [0] * 12 + [1] * 12
        assert frame.answer.tolist() == ["yes"] * 12 + ["no"] * 12
        assert frame.source.tolist() == (["a"] * 6 + ["b"] * 6) * 2
        row = frame.iloc[12 + 6 + 5]
        assert (row["first"], row["last"], row["head"], row["part"]) == (2, 2, 0, "kept")
        assert (row.probability, row.probability_cut, row.logit, row.logit_cut) == pytest.approx((0.25, 0.24, 4.0, 2.4))
        assert frame.change.tolist() == pytest.approx(
            [0.01 * (at + 1) / self.PROBABILITY[at // 12] - 1 for at in range(24)]
        )


class TestPatching:
    def result(self, direction: str = "denoise", site: str = "state") -> Patching:
        values = np.stack([0.01 * np.arange(9), np.arange(9.0) - 4], axis=-1).reshape(3, 3, 2)
        return Patching(
            provenance=ABOUT,
            **dict(clean=(" good", " a", " film", " it"), corrupted=(" bad", " a", " film", " it"), site=site),
            **dict(direction=direction, metric="difference", positions=(0, 2, 3), answer="yes", contrast="no"),
            **dict(base=np.array([0.5, -1.0]), other=np.array([0.9, 1.0]), values=values),
            **dict(attributed=np.arange(6.0).reshape(2, 3) if site == "state" else np.empty((0, 3))),
            agreement=(0.875, -0.5),
        )

    def test_what_it_says(self):
        first, second = prose(self.result())[1:]
        said = "Patching states after a token on own: “yes” or “no”, flipped first at token 0 “good/bad”"
        assert prose(self.result())[0] == said
        assert first == (
            "“yes” or “no”; corrupted: probability 0.500, difference of logits −1; clean: probability 0.900, "
            "difference of logits 1."
        )
        assert second == "Correlation of the gradient's approximation with it: 0.875 (Pearson), −0.500 (Spearman)."
        assert (
            "“yes” or “no”; clean: probability 0.500, difference of logits −1; corrupted: prob"
            in prose(self.result("noise"))[1]
        )
        assert self.result().tables()[0].note.startswith("Values of the clean run in the corrupted one;")
        assert self.result("noise").tables()[0].note.startswith("Values of the corrupted run in the clean one;")

    def test_the_first_token_that_flips_the_answer(self):
        """All layers patched together, or single ones where only these are known, change the difference's sign."""
        result = self.result()
        values = result.values.copy()
        values[2, :2, 1] = -0.5
        assert replace(result, values=values).headline.endswith("flipped first at token 3 “it”")
        values[2, :, 1] = -0.5
        assert replace(result, values=values).headline.endswith("“yes” or “no”, flipped by no token")
        values[..., 0] = np.nan
        assert replace(result, values=values).headline.endswith("flipped first at token 3 “it”")
        assert replace(result, site="head").headline.endswith("flipped first by layer 2, head 0")
        assert replace(result, site="head", base=np.array([0.5, 5.0])).headline.endswith("first by layer 0, head 0")

    def test_the_cell_that_changes_the_most_is_measured_from_the_plain_run(self):
        """The last row, of all layers together, does not count."""
        assert self.result().verdict() == "most in layer 0, 0 “good/bad”: −4 (difference of logits)"
        assert replace(self.result(), base=np.array([0.5, -4.0])).verdict().startswith("most in layer 1, 3 “it”: 1 (")
        of_chance = replace(self.result(), metric="probability")
        assert of_chance.verdict() == "most in layer 0, 0 “good/bad”: 0 (probability of the answer)"
        assert replace(of_chance, base=np.array([0.0, -1.0])).verdict().startswith("most in layer 1, 3 “it”: 0.0500 (")

    def test_long_answers_are_cut(self):
        short, long = "x" * 20, "y" * 9 + "…" + "y" * 10
        assert replace(self.result(), answer="x" * 20, contrast="y" * 21).asked == f"“{short}” or “{long}”"
        assert replace(self.result(), contrast="x" * 20, answer="y" * 21).asked == f"“{long}” or “{short}”"

    def test_without_one_of_the_two(self):
        only = self.result(site="head")
        assert only.is_exact and not any("Correlation of" in said or "Approximated" in said for said in prose(only))
        values = self.result().values.copy()
        values[..., 0] = np.nan
        near = replace(self.result(), values=values)
        assert not near.is_exact and "Approximated by a gradient, to first order: attribution patching." in prose(near)
        assert not any("Correlation of" in said for said in prose(near))
        long = replace(self.result(), clean=("x" * 25, "b", "c", "d"), corrupted=("x" * 25, "b", "c", "d"))
        assert long.name(1, 0) == f"layer 1, 0 “{'x' * 9}…{'x' * 10}”"
        assert only.name(1, 2) == "layer 1, head 2"

    def test_its_frame(self):
        frame = self.result().to_frame()
        assert frame.layer.fillna(-1).tolist() == [0] * 3 + [1] * 3 + [-1] * 3
        assert frame.position.tolist() == [0, 2, 3] * 3 and frame["head"].isna().all()
        assert frame.token.tolist() == ["good/bad", "film", "it"] * 3
        assert frame.probability.tolist() == pytest.approx(0.01 * np.arange(9))
        assert frame.difference.tolist() == (np.arange(9.0) - 4).tolist()
        assert frame.normalised.tolist() == ((np.arange(9.0) - 3) / 2).tolist()
        assert frame.attributed.fillna(-1).tolist() == [0, 1, 2, 3, 4, 5, -1, -1, -1]
        heads = self.result(site="head").to_frame()
        assert heads.layer.tolist() == [0] * 3 + [1] * 3 + [2] * 3 and heads["head"].tolist() == [0, 1, 2] * 3
        assert heads.position.isna().all() and set(heads.token) == {""} and heads.attributed.isna().all()

    def test_approximations_are_in_the_unit_of_the_metric(self):
        result = self.result()
        assert result.approximated().tolist() == (np.arange(6.0) - 1).reshape(2, 3).tolist()
        share = Patching(**{**vars(result), "metric": "normalised"})
        assert share.approximated().tolist() == (np.arange(6.0) / 2).reshape(2, 3).tolist()


class TestSteering:
    PROBABILITY = numbered(3, 4)
    PROBABILITY[2, :, 0] = [0.1, 0.0, -0.3, 0.2]
    COSTS = 0.1 + numbered(3, 4, 3)

    def result(self, *, costs: bool = True, strengths=(-2.0, 0.0, 0.5, 4.0), answers=("yes", "yes")) -> Steering:
        return Steering(
            provenance=ABOUT,
            **dict(site="residual", layer=3, strengths=strengths, answers=answers, norm=2.5, classifies=False),
            **dict(direction=(np.ones(4),), probability=self.PROBABILITY, by_direction=np.zeros((6, 4))),
            costs=self.COSTS if costs else np.empty((3, 4, 0, 3)),
        )

    def test_what_it_says(self):
        """The strength whose difference from random directions is the largest, whatever its sign."""
        assert self.result().headline == (
            "Steering on own: probability of “yes” 0.020, 0.030 at strength 0.5 of a direction in the residual "
            "stream before layer 3, 0.070 with random ones; loss 0.170 on other data"
        )
        assert self.result().verdict() == (
            "at strength 0.5 the probability of “yes” is 0.030 [0.028, 0.032], with random directions 0.070 [0.068, "
            "0.072]; loss on other data 0.170 [0.168, 0.172]"
        )
        assert (
            "probability of the predicted answers 0.030 at strength −0.5 of"
            in self.result(strengths=(-2.0, 3.0, -0.5, 4.0), answers=("yes", "no")).headline
        )
        assert prose(self.result())[1] == (
            "The probability of “yes” on 2 texts; a direction of norm 2.50, and its cost on 1,200 examples of drawn "
            "(test), compared with 5 random directions of that norm."
        )
        assert prose(self.result(costs=False))[1] == (
            "The probability of “yes” on 2 texts; a direction of norm 2.50, compared with 5 random directions of that "
            "norm."
        )

    def test_beside_others(self):
        free = self.result(costs=False)
        compared = Steering.compare([self.result(), free], [("x",), ("y",)])
        assert (compared.heads, compared.columns) == (
            ("model", "site"), ("strength", "probability", "random", "held-out loss"),
        )  # fmt: skip
        assert [(*labels, *(cell.value for cell in cells)) for labels, cells in compared.rows] == [
            ("x", "residual", "0.5", "0.030", "0.070", "0.170"),
            ("y", "residual", "0.5", "0.030", "0.070", ""),
        ]

    def test_its_table(self):
        assert rows(self.result()) == self.expected()
        (table,) = self.result().tables()
        assert table.columns == ("probability", "random", "difference", "held-out loss", "loss, random")
        assert table.note.startswith("Intervals: bootstrap over texts and over held-out examples.")
        assert self.result(costs=False).tables()[0].columns == ("probability", "random", "difference")

    def test_digits_are_those_that_the_largest_of_both_directions_needs(self):
        """Random directions count too, the difference does not."""
        for row, other in ((0, 1), (1, 0)):
            means = np.full((3, 4, 3), 2e-5)
            means[row] = 0.5
            (table,) = replace(self.result(costs=False), probability=means).tables()
            assert [cell.digits for cell in table.rows[0][1]] == [3, 3, 3], other
        means = np.full((3, 4, 3), 2e-5)
        means[2] = 0.5
        (table,) = replace(self.result(costs=False), probability=means).tables()
        assert table.rows[0][1][0].digits != 3

    def test_what_intervals_are_over(self):
        one = self.result(answers=("yes",))
        assert one.tables()[0].note.startswith("Intervals: bootstrap over held-out examples.")
        assert replace(one, costs=np.empty((3, 4, 0, 3))).tables()[0].note == "In brackets: the 95 % interval."

    def expected(self) -> dict[str, list[str]]:
        """Digits are those of the largest share."""
        found = {}
        for at, label in enumerate(("−2", "0", "0.5", "4")):
            numbers = [*(self.PROBABILITY[row, at] for row in range(3)), self.COSTS[0, at, 0], self.COSTS[1, at, 0]]
            found[label] = [f"{value:.3f} [{low:.3f}, {high:.3f}]".replace("-", "−") for value, low, high in numbers]
        return found

    def test_its_frame(self):
        frame = self.result().to_frame()
        assert frame.which.tolist() == ["direction"] * 4 + ["random"] * 4 + ["difference"] * 4
        assert frame.strength.tolist() == [-2.0, 0.0, 0.5, 4.0] * 3
        np.testing.assert_allclose(ends(frame, "probability"), self.PROBABILITY.reshape(12, 3))
        for at, measure in enumerate(MEASURES):
            np.testing.assert_allclose(ends(frame, f"held_out_{measure}"), self.COSTS[:, :, at].reshape(12, 3))
