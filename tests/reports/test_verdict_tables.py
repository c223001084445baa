"""Lines and tables of any kind of result: their lengths, undefined numbers, and the origin of numbers."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pandas as pd
import pytest
import reported
from stand_ins import INTERVALS, NAN, Stand, beside, e, said, shown

from ssmscope.render.markup import to_latex, to_markdown
from ssmscope.render.table import MAX_COMPARED_ROWS, Cell, Table, frame_table, in_percent
from ssmscope.render.table import with_interval as as_text
from ssmscope.reports.grouping import MAX_VERDICT_CHARACTERS
from ssmscope.reports.page import _origin, duration, flatten, shortened


class TestVerdicts:
    def test_a_line_is_no_longer_than_it_may_be_and_shows_no_control_character(self) -> None:
        long = Stand("influence", verdict=lambda at: "x" * 500)
        assert len(said(long)) == MAX_VERDICT_CHARACTERS and "…" in said(long)
        assert "\x1b" not in said(Stand("influence", verdict=lambda at: "a\x1b[31mb"))

    def test_a_headline_loses_the_model_alone(self) -> None:
        for headline, line in (
            ("Bound of own: none", "none"),
            ("Bound on own: a: b", "a: b"),
            ("Bound of another: none", "Bound of another: none"),
        ):
            assert said(Stand("bound", headline=headline)) == line

    def test_numbers_that_are_not_defined(self) -> None:
        assert in_percent(e(NAN)) == "not defined" and as_text(e(NAN)) == "not defined"


class TestTablesOfAnyKind:
    FRAME = pd.DataFrame(
        {
            "name": ["a", "b"], "count": [3, 12_000], "share": [0.123456, NAN], "share_low": [0.1, NAN],
            "share_high": [0.2, NAN], "value": [1.0, -math.inf], "low": [0.5, NAN], "high": [1.5, NAN],
            "right": [True, False],
        }
    )  # fmt: skip

    def test_folded(self) -> None:
        table = frame_table(self.FRAME, heads=["name"])
        assert (table.heads, table.columns) == (("name",), ("count", "share", "value", "right"))
        assert shown(table) == [
            ("a", "3", "0.1235 [0.1000, 0.2000]", "1 [0.5000, 1.500]", "yes"),
            ("b", "12,000", "–", "−∞", "no"),
        ]
        assert table.numbers == (True, True, True, False) and table.note == INTERVALS
        missing = frame_table(self.FRAME.assign(none=NAN, some=[NAN, 2.0]), heads=["name"])
        assert missing.columns == (*table.columns, "some")
        cut = frame_table(self.FRAME, limit=1)
        assert len(cut.rows) == 1 and cut.remarks == f"1 of 2 rows. {INTERVALS}"

    def test_several_frames_stand_below_each_other_and_share_the_rows(self) -> None:
        def result(rows: int, value: float) -> Stand:
            return Stand("trajectory", to_frame=lambda: pd.DataFrame({"kl": [value] * rows}))

        table = beside(result(2, 0.5), result(1, 0.25))
        assert (table.heads, shown(table)) == (("model",), [("a", "0.5000"), ("a", "0.5000"), ("b", "0.2500")])
        many = beside(result(MAX_COMPARED_ROWS, 0.5), result(3, 0.25))
        assert (
            len(many.rows) == MAX_COMPARED_ROWS // 2 + 3
            and many.remarks == f"{MAX_COMPARED_ROWS // 2 + 3} of {MAX_COMPARED_ROWS + 3} rows."
        )

    @pytest.mark.parametrize(
        ("cell", "value", "interval"),
        [
            (Cell(e(0.12345, 0.1, 0.2)), "0.123", "[0.100, 0.200]"),
            (Cell(e(0.12345), digits=1), "0.1", ""),
            (Cell(e(123456.7), digits=None), "1.235e+05", ""),
            (Cell(e(-0.0001)), "0.000", ""),
            (Cell(e(-0.5, -1.0, 0.0)), "−0.500", "[−1.000, 0.000]"),
            (Cell(e(NAN, 0.1, 0.2)), "–", "[0.100, 0.200]"),
            (Cell(e(math.inf)), "∞", ""),
            (Cell(e(0.1, 0.0, NAN)), "0.100", ""),
            (Cell(text="words"), "words", ""),
        ],
    )
    def test_cells(self, cell: Cell, value: str, interval: str) -> None:
        assert (cell.value, cell.interval) == (value, interval)

    def test_written(self) -> None:
        cells = (Cell(e(0.5, 0.4, 0.6), best=True), Cell(e(0.25), worst=True), Cell(text="a_b"))
        table = Table(("model",), ("x ↑", "y", "z"), ((("m|1",), cells),), "A note.")
        assert to_markdown(table) == (
            "| model | x ↑ | y | z |\n| --- | ---: | ---: | --- |\n"
            "| m\\|1 | **0.500** [0.400, 0.600] | 0.250 ▼ | a\\_b |\n\nA note.\n"
        )
        assert (
            "m\\textbar{}1 & \\textbf{0.500} {\\scriptsize [0.400, 0.600]} & \\underline{0.250} & a\\_b \\\\\n"
        ) in to_latex(table)
        assert "\\begin{tabular}{lrrl}\n" in to_latex(table) and "% A note.\n" in to_latex(table)


class TestItems:
    def test_where_numbers_come_from(self) -> None:
        examples = tuple(SimpleNamespace(queries=queries, gradients=2) for queries in (1_000, 234))
        result = Stand("words", examples=examples)
        entry = dataclasses.replace(
            reported.entry("words", result, options={"limit": 4, "beam": None, "merge": False, "layers": [0, 3]}),
            key="0123456789abcdef",
            seconds=119.96,
        )
        assert _origin(entry) == [
            ("key", "0123456789abcdef"), ("took", "120.0 s"), ("option limit", "4"), ("option beam", "none"),
            ("option merge", "no"), ("option layers", "0, 3"), ("model", "own"), ("fingerprint", "f"),
            ("queries", "1,234 texts and 4 gradients"),
        ]  # fmt: skip
        both = dataclasses.replace(entry, results=(result, Stand("heatmap")), seconds=None)
        names = [name for name, _ in _origin(both)]
        assert names[5:] == [
            "words model", "words fingerprint", "words queries", "heatmap model", "heatmap fingerprint",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("seconds", "words"),
        [(0.04, "0.0 s"), (119.9, "119.9 s"), (120, "2 min 0 s"), (3_725.4, "62 min 5 s"), (7_260, "2 h 1 min")],
    )
    def test_durations(self, seconds: float, words: str) -> None:
        assert duration(seconds) == words

    def test_values_are_cut(self) -> None:
        assert flatten({"a": {"b": "x" * 301}})[0][0] == "a b"
        assert shortened("x" * 300) == "x" * 300 and shortened("x" * 301).endswith("(301 characters)")
