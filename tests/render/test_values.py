"""Numbers, tokens and tables as every view writes them, at the values where their form changes."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd
import pytest

from ssmscope.core.bootstrap import Estimate
from ssmscope.render import token_rows
from ssmscope.render.blocks import TokenRow, TokenText
from ssmscope.render.colours import SHADES, SIGNED, STEPS, ink, ramp, signed_shades
from ssmscope.render.numbers import (
    brackets,
    counted,
    evenly_spaced,
    format_range,
    number,
    number_runs,
    percent_of,
    score_range,
    token_count,
)
from ssmscope.render.table import (
    MAX_CELL_CHARACTERS,
    MAX_COMPARED_ROWS,
    Cell,
    Line,
    as_share,
    digits_of,
    frame_table,
    frames_table,
    in_percent,
    interval_columns,
    number_cell,
    short_cell,
    shown_names,
    table,
    value_cell,
)
from ssmscope.render.table import with_interval as with_interval
from ssmscope.render.tokens import name_scores, short_token, shorten, spell_tokens, visible

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        *((NAN, None, "–"), (INF, None, "∞"), (-INF, 2, "−∞"), (0, None, "0"), (-3.0, None, "−3"), (7.0, 0, "7")),
        *((999_999, None, "999,999"), (1e6, None, "1.00e+06"), (7.0, 2, "7.00"), (-0.0004, 3, "0.000")),
        *((0.5, None, "0.500"), (12.346, None, "12.3"), (1234.5, None, "1.23e+03"), (-0.25, 1, "−0.2")),
        *((123.4, None, "123"), (0.0, 2, "0.00"), (-1.005, None, "−1.00"), (-999_999.0, None, "−999,999")),
    ],
)
def test_numbers(value, digits, text):
    assert number(value, digits) == text


def test_counts_and_shares():
    assert [counted(n, "text") for n in (0, 1, 2, 2000)] == ["0 texts", "1 text", "2 texts", "2,000 texts"]
    assert [percent_of(n, 10_000) for n in (0, 4, 5, 6, 120, 9_999, 10_000)] == [
        *("0", "4", "0.1 %", "0.1 %", "1.2 %", "100.0 %", "all")
    ]
    counts = (3, 9.96, 10, 99.94, 100, 1234.5, 999_999, 1e6, 2.46e9, INF)
    assert [token_count(n) for n in counts] == [
        *("3", "10", "10.0", "99.9", "100", "1,234", "999,999", "1.0·10^6", "2.5·10^9", "∞")
    ]
    assert [as_share(x) for x in (0, 0.0099, 0.01, 0.5, NAN)] == ["0.000", "0.00990", "0.010", "0.500", "not defined"]


def test_intervals():
    found = Estimate(0.5, 0.25, 0.75)
    assert brackets(found) == " [0.250, 0.750]" and brackets(found, 1) == " [0.2, 0.8]"
    assert brackets(Estimate(0.5, NAN, NAN)) == ""
    assert with_interval(found) == "0.500 [0.250, 0.750]" and with_interval(Estimate(NAN, NAN, NAN)) == "not defined"
    assert in_percent(found) == "50.0 % [25.0, 75.0]" and in_percent(found, sign=False) == "50.0 [25.0, 75.0]"
    assert in_percent(found, interval=False) == "50.0 %"
    assert in_percent(Estimate(-0.0004, -0.02, 0.01)) == "0.0 % [−2.0, 1.0]"
    assert digits_of([Estimate(0.009, NAN, NAN), Estimate(-0.01, NAN, NAN)]) == 3
    assert digits_of([Estimate(0.0099, NAN, NAN)]) is None
    assert (number_cell(0.123456).value, short_cell(0.123456).value, value_cell(found).value) == (
        "0.1235",
        "0.123",
        "0.500",
    )
    assert (
        Cell(found).interval == "[0.250, 0.750]" and value_cell(found).interval == "" and Cell(text="a").interval == ""
    )
    assert short_cell(2.0, "vacuous").value == "vacuous" and len(Cell(text="x" * 300).value) == MAX_CELL_CHARACTERS


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


class TestTokens:
    def test_what_would_not_show_is_a_symbol(self):
        given = (" film", "  film", "film ", "a  b", " ", "   ", "\n", "\x07", "\x85", "\u202e", "\u00a0", "\ud800")
        assert [visible(token) for token in given] == [
            *(" film", " ␣film", "film␣", "a␣␣b", "␣", "␣␣␣"),
            *("↵", "␇", "⟨0085⟩", "⟨202E⟩", "␣", "\ufffd"),
        ]

    def test_gaps(self):
        assert spell_tokens([" a", "b", " c"], [0, 0, 1]) == [(False, "a"), (False, "b"), (True, "c")]
        assert spell_tokens(["a", "##b", "c", "[SEP]"], [0, 0, 1, None]) == [
            *((False, "a"), (False, "##b"), (True, "c"), (True, "[SEP]"))
        ]

    def test_in_little_room(self):
        assert [shorten("abcdefgh", width) for width in (8, 7, 6, 3)] == ["abcdefgh", "abc…fgh", "ab…fgh", "a…h"]
        assert [short_token(token, 5) for token in (" film", " ", "abcdefg")] == ["film", "␣", "ab…fg"]
        assert name_scores(["a", " b", "c"], np.array([1.0, -0.25, 3]), [1, 0]) == "b −0.250 · a 1"

    def test_ends(self):
        scores, special = np.array([0.0, 1, 3, 9]), np.array([False, False, False, True])
        assert score_range(scores, special) == "0.000–3.000" and score_range(scores, np.ones(4, bool)) == "no scores"
        assert format_range(0.5, 0.5) == "0.500–0.500" and format_range(0.96815, 0.96958) == "0.96815–0.96958"
        assert format_range(-1, 2) == "−1.000–2.000" and format_range(0, 1e-12) == "0.00000000–0.00000000"

    def test_layers(self):
        assert number_runs((0, 1, 2, 5)) == "0–2, 5" and number_runs((3,)) == "3" and number_runs((1, 3, 4)) == "1, 3–4"
        assert evenly_spaced(5, 9) == [0, 1, 2, 3, 4] and evenly_spaced(10, 4) == [0, 3, 6, 9]

    def test_colours(self):
        assert ramp(("#000000", "#ff8000"), 3) == ["#000000", "#804000", "#ff8000"]
        assert ramp(("#000000", "#ffffff", "#0000ff"), 3) == ["#000000", "#ffffff", "#0000ff"]
        # Grey of luminance √(0.05 · 1.05) − 0.05 = 0.179 reads alike on both: #747474 has 0.174, #777777 has 0.184.
        assert [ink(each) for each in ("#000000", "#747474", "#777777", "#ffffff", "#0000ff", "#ffff00")] == [
            *("#ffffff", "#ffffff", "#000000", "#000000", "#ffffff", "#000000")
        ]
        every = signed_shades()
        assert len(every) == 2 * STEPS + 1
        assert (every[0], every[STEPS], every[-1]) == (SIGNED[0], SIGNED[len(SIGNED) // 2], SIGNED[-1])


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
