"""Lines and tables of any kind of result: their lengths, undefined numbers, and the origin of numbers."""

import pandas as pd
from stand_ins import NAN, Stand, beside, e, said, shown
from ssmscope.render.table import MAX_COMPARED_ROWS, in_percent
from ssmscope.render.table import with_interval as as_text
from ssmscope.reports.grouping import MAX_VERDICT_CHARACTERS


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
