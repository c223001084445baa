"""Numbers, tokens and tables as every view writes them, at the values where their form changes."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd

from ssmscope.core.bootstrap import Estimate
from ssmscope.render import token_rows
from ssmscope.render.blocks import TokenRow, TokenText
from ssmscope.render.colours import SHADES, STEPS
from ssmscope.render.table import (
    MAX_COMPARED_ROWS,
    Cell,
    Line,
    frame_table,
    frames_table,
    interval_columns,
    number_cell,
    shown_names,
    table,
)
from ssmscope.render.table import with_interval as with_interval

NAN, INF = math.nan, math.inf


class TestTables:
    LINES = (
        Line(("a",), {"up": Cell(Estimate(1, 0, 2)), "down": number_cell(3), "other": number_cell(5)}, peers=0),
        Line(("b",), {"up": Cell(Estimate(4, 3, 5)), "down": number_cell(1), "other": number_cell(9)}, peers=0),
        Line(("c",), {"up": Cell(Estimate(9, 8, 9)), "down": number_cell(NAN)}, peers=1),
        Line(("d",), {"up": Cell(Estimate(9, 8, 9)), "down": number_cell(0), "late": Cell(text="yes")}, peers=1),
    )

    def test_the_best_of_its_peers_is_marked(self):
        found = table(("model",), self.LINES, more=["up"], less=["down"], note="A note.")
        assert (found.heads, found.columns) == (("model",), ("up ↑", "down ↓", "other", "late"))
        best = [[cell.best for cell in cells] for _, cells in found.rows]
        assert best == [[False] * 4, [True, True, False, False], [False] * 4, [False] * 4]
        assert found.numbers == (True, True, True, False) and found.every == 4
        brief = "★ and bold: the best mean of those compared. In brackets: the 95 % interval."
        assert found.remarks == f"A note. {brief}"

    def test_the_first_of_many(self):
        found = table(("model",), self.LINES, most=3)
        assert [labels for labels, _ in found.rows] == [("a",), ("b",), ("c",)] and found.every == 4
        assert found.remarks == "3 of 4 rows. In brackets: the 95 % interval."
        assert found.head(1).remarks.startswith("1 of 4 rows.") and found.head(None) == found
        worst = table(("model",), [Line(("a",), {"x": Cell(text="b", worst=True)})])
        assert worst.remarks == "▼ and underlined: the worst of its row."

    def test_tidy_tables_are_folded(self):
        frame = pd.DataFrame(
            {
                **{"model": ["m", "m"], "name": ["a", "b"], "loss": [0.5, NAN], "loss_low": [0.4, NAN]},
                **{"loss_high": [0.6, NAN], "count": [3, 4], "right": [True, False], "none": [None, None]},
            }
        )
        assert interval_columns(frame) == {"loss": ("loss_low", "loss_high")}
        found = frame_table(frame, heads=["name"])
        assert (found.heads, found.columns) == (("name",), ("loss", "count", "right"))
        shown = [(labels, [(cell.value, cell.interval) for cell in cells]) for labels, cells in found.rows]
        assert shown == [
            (("a",), [("0.5000", "[0.4000, 0.6000]"), ("3", ""), ("yes", "")]),
            (("b",), [("–", ""), ("4", ""), ("no", "")]),
        ]
        assert frame_table(frame, heads=["name"], limit=1).remarks == "1 of 2 rows. In brackets: the 95 % interval."
        several = frame.assign(model=["m", "n"])
        assert frame_table(several).columns[0] == "model" and "model" not in frame_table(frame).columns
        plain_names = pd.DataFrame({"value": [1.0], "low": [0.5], "high": [1.5], "x": [2.0]})
        assert interval_columns(plain_names) == {"value": ("low", "high")}
        assert frame_table(plain_names).columns == ("value", "x")

    def test_of_several_results(self):
        frames = [pd.DataFrame({"model": [name] * size, "x": range(size)}) for name, size in (("a", 150), ("b", 30))]
        found = frames_table(frames, ["one", "two"])
        assert [labels for labels, _ in found.rows] == [("one",)] * 100 + [("two",)] * 30
        assert (found.heads, found.columns, found.every) == (("model",), ("x",), 180)
        assert frames_table(frames[:1], ["one"]) == frame_table(frames[0], limit=MAX_COMPARED_ROWS)
        many = frames_table([frames[1]] * 40, [str(at) for at in range(40)])
        assert len(many.rows) == 40 * 10
        assert shown_names(["p", "q"], ["a", "b"]) == ["p", "q"] and shown_names(["p"], ["a", "b"]) == ["a", "b"]


class TestTokenRows:
    TEXT = ("[CLS]", " a", " b", " c", " d"), (None, 0, 1, 2, 3)

    def spans(self, row, span=None):
        """Return the classes and the colour level of every token."""
        text = TokenText(*self.TEXT, [row], "yes", 0.75, span=span)
        found = re.findall(r'<span class="([^"]*)"(?: data-l="(-?\d+)")?>', str(token_rows.tokens(row, text)))
        return [(set(classes.split()), int(level) if level else None) for classes, level in found]

    def test_scores_from_the_lowest_to_the_highest(self):
        row = TokenRow(
            "mean", np.array([9.0, 0, 0.5, 1, 2]), (0, 1), outside=np.array([True, *[False] * 4]), marked=[3]
        )
        middle = f"v{round((SHADES - 1) / 2)}"
        top = f"v{SHADES - 1}"
        assert self.spans(row) == [
            *(({"special", "out"}, None), ({"v0"}, None), ({middle}, None), ({top, "kept"}, None), ({top}, None))
        ]

    def test_scores_for_and_against(self):
        scores = np.array([9.0, -1, 0, 0.5, 3])
        row = TokenRow("ig", scores, (-1, 1), True, np.array([True, *[False] * 4]), [4], [1])
        assert self.spans(row, span=(2, 4)) == [
            *(({"special", "out"}, None), ({"against"}, -STEPS), ({"within"}, 0), ({"within"}, STEPS // 2)),
            ({"kept"}, STEPS),
        ]
