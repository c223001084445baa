"""First lines of a result: all prose, then as many rows and texts as fit, and where the rest is."""

import io
from typing import Any

import pytest
from rich.console import Console, Group
from rich.text import Text
import ssmscope
from ssmscope.cli import run
from ssmscope.core.bootstrap import Estimate
from ssmscope.render.blocks import Block, Custom, Picture, Prose
from ssmscope.render.brief import MAX_LINES, brief
from ssmscope.render.table import Cell, Line, Table, short_cell, table


def rows(count: int, name: str = "row", note: str = "") -> Table:
    return table(("name",), [Line((f"{name} {at}",), {"value": short_cell(at)}) for at in range(count)], note=note)


def lines(*blocks: Block, width: int = 60) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    console.print(Group(*brief(blocks, console, "--full")))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


TITLE, FIGURE = Prose("A finding.", "title"), Picture(lambda: pytest.fail("nothing is drawn"))


def test_what_fits_is_shown_whole() -> None:
    assert lines(TITLE, FIGURE, Prose("Said."), rows(2)) == [
        *("A finding.", "", "Said.", ""),
        *("name   value", "row 0      0", "row 1      1"),
    ]


def test_definitions_are_left_out_and_told_of() -> None:
    plain = lines(TITLE, rows(2))
    assert lines(TITLE, rows(2, note="A row is a row.")) == [*plain, "More: --full"]
    assert lines(TITLE, rows(2), Prose("A row is a row.", "definition")) == [*plain, "More: --full"]


def test_a_long_table_is_cut_to_the_lines_that_there_are() -> None:
    found = lines(TITLE, Prose("Note: careful.", "note"), rows(60))
    assert len(found) == MAX_LINES and found[1] == "Note: careful." and found[-1] == "More: --full"
    shown = sum(line.startswith("row ") for line in found)
    assert found[-2] == f"{shown} of 60 rows." and shown == MAX_LINES - 6  # title, note, gap, head and two remarks


def test_tables_share_the_room_in_order_and_the_last_are_left_out_with_their_headings() -> None:
    many: list[Block] = [each for at in range(9) for each in (Prose(f"Part {at}", "heading"), rows(5, f"t{at}"))]
    found = lines(TITLE, *many)
    # What is kept for tables that then do not fit goes to those before them.
    assert len(found) == MAX_LINES and found[-1] == "More: --full"
    headed = [line for line in found if line.startswith("Part")]
    assert headed[0] == "Part 0" and 1 < len(headed) < 9 and all(f"t{name[-1]} 0" in str(found) for name in headed)
    two = lines(TITLE, rows(40, "a"), rows(3, "b"))
    assert len(two) <= MAX_LINES and sum(line.startswith("b ") for line in two) == 3
    for count, shown in ((5, 5), (9, 2)):  # A table that lacks few lines becomes whole first; a longer one waits.
        found = lines(TITLE, rows(40, "a"), rows(count, "b"))
        assert len(found) == MAX_LINES and sum(line.startswith("b ") for line in found) == shown


def test_intervals_are_whole_or_left_out() -> None:
    cells = {f"value {at}": Cell(Estimate(0.5, 0.25, 0.75), digits=2) for at in range(4)}
    found = table(("name",), [Line(("a",), cells), Line(("b",), cells)])
    stacked = lines(TITLE, found, width=66)
    assert stacked[-3].split() == ["b", *["0.50"] * 4] and stacked[-2].split("  ")[-4:] == ["[0.25, 0.75]"] * 4
    narrow = lines(TITLE, found, width=50)
    assert len(narrow) == 6 and narrow[-2].split() == ["b", *["0.50"] * 4] and narrow[-1] == "More: --full"


def test_notes_at_the_end_give_way_to_the_rows_of_tables() -> None:
    notes = [Prose(f"Note {at}.", "note") for at in range(5)]
    found = lines(TITLE, rows(6, "a"), rows(6, "b"), *notes)
    assert sum(line.startswith(("a ", "b ")) for line in found) == 12
    assert "Note 0." in found and "Note 4." not in found and found[-1] == "More: --full"
    assert "Note 4." in lines(TITLE, rows(2), *notes)


def test_views_of_their_own_are_cut_between_their_lines() -> None:
    found = lines(TITLE, Custom(lambda colours: [Text(f"line {at}") for at in range(50)]), Custom(html=lambda: "<p>"))
    assert len(found) == MAX_LINES and found[2] == "line 0" and found[-2] == f"line {MAX_LINES - 4}"
    assert lines(TITLE, Custom(lambda colours: rows(2))) == lines(TITLE, rows(2))


def test_rows_of_several_lines_count_as_such() -> None:
    wide = table(("name",), [Line(("a word " * 30,), {"value": short_cell(at)}) for at in range(20)])
    assert 10 < len(lines(TITLE, wide)) <= MAX_LINES


def test_many_texts_take_as_many_lines_as_one(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"film number {at} is dull\n" for at in range(60)))
    given = ["heatmap", "demo/sst2-mamba2", "--file", str(texts), "--out", str(tmp_path / "out"), "--formats", "csv"]
    assert run(given) == 0
    found = capsys.readouterr().out.splitlines()
    assert len(found) <= 25 and found[-1].endswith("heatmap.json, .csv") and "More: --full" in found
    assert run([*given, "--full"]) == 0
    assert 25 < len(capsys.readouterr().out.splitlines()) < 250


def test_python_is_told_in_its_own_words() -> None:
    found = ssmscope.heatmap(ssmscope.load("demo/sst2-mamba2"), "A dull film.")
    assert str(found).endswith("More: to_text(full=True)\n") and "Survival: what is left" not in str(found)
    assert "Survival: what is left" in found.to_text(full=True)
