"""The files of a report: one table of everything that reads back, tables for papers, figures."""

import csv
import io
import os
import re
import xml.etree.ElementTree

import numpy as np
import pandas as pd
import pytest
import reported
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from ssmscope.render.markup import LATEX, for_latex
from ssmscope.render.pictures import MAX_SVG_BYTES, data_uri, encode_figure
from ssmscope.render.table import MAX_CELL_CHARACTERS
from ssmscope.render.tokens import shorten, visible
from ssmscope.reports import exports
from ssmscope.reports.grouping import comparison, groups


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    paths = exports.write(reported.small(), directory)
    return directory, paths


class TestEverything:
    def test_it_reads_back_as_it_was_made(self, written):
        directory, _ = written
        made = exports.everything(reported.small())
        read = pd.read_parquet(directory / "all.parquet")
        assert list(read.columns) == list(made.columns)
        pd.testing.assert_frame_equal(read.convert_dtypes(), made.convert_dtypes())

    def test_every_row_of_every_result_is_in_it(self):
        made = exports.everything(reported.small())
        found = [one for group in groups(reported.small()) for one in group.results()]
        assert len(made) == sum(len(one.result.to_frame()) for one in found)
        for one in found:
            frame = one.result.to_frame()
            rows = made[(made.key == one.entry.key) & (made.kind == one.result.kind)]
            assert rows["row"].tolist() == list(range(len(frame)))
            assert set(rows.verb) == {one.entry.verb} and set(rows.heading) == {one.entry.heading}
            assert set(rows.model) == {", ".join(one.entry.models)}
            for name in frame.drop(columns="model") if len(one.entry.models) == 1 else frame:
                own = f"of_{name}" if name in exports.ID_COLUMNS else name
                if frame[name].isna().all():
                    assert own not in rows or rows[own].isna().all()
                    continue
                stored = next(c for c in (f"{own}:text", f"{own}:flag", own) if c in rows and rows[c].notna().any())
                if frame[name].dtype.kind in "iuf":
                    values = rows[stored].astype("Float64").to_numpy(dtype=float, na_value=np.nan)
                    assert np.array_equal(values, frame[name].to_numpy(dtype=float, na_value=np.nan), equal_nan=True)
                else:
                    wanted = [None if pd.isna(value) else value for value in frame[name].tolist()]
                    if stored.endswith(":text") or rows[stored].dtype == "string":
                        wanted = [None if value is None else str(value) for value in wanted]
                    assert [None if value is pd.NA else value for value in rows[stored].tolist()] == wanted

    def test_a_name_that_stands_for_numbers_and_for_words_is_two_columns(self):
        made = exports.everything(reported.small())
        layers = made[made.kind == "stability"]["layer"]
        assert layers.tolist() == [0, 1]
        assert set(made[made.kind == "heatmap"]["layer:text"]) == {"mean", "0", "1"}
        assert made[made.kind == "heatmap"]["layer"].isna().all()

    def test_options_tell_runs_of_a_matrix_apart(self):
        made = exports.everything(reported.small())
        assert sorted(set(made[made.verb == "position"].options)) == [
            '{"limit": 4, "seed": 0}',
            '{"limit": 4, "seed": 1}',
        ]

    def test_a_report_without_results(self, tmp_path):
        empty = reported.report(reported.failed("words", "e", "t"))
        exports.write(empty, tmp_path)
        read = pd.read_parquet(tmp_path / "all.parquet")
        assert list(read.columns) == list(exports.ID_COLUMNS) and not len(read)

    def test_texts_of_every_script(self, tmp_path):
        tokens = ["שלום", "👩‍👩‍👧", "日本", "\n", '"']
        exports.write(reported.report(reported.entry("heatmap", reported.heatmap([tokens]))), tmp_path)
        read = pd.read_parquet(tmp_path / "all.parquet")
        assert read.token.tolist()[: len(tokens)] == tokens
        read = pd.read_csv(tmp_path / "tables" / "heatmap.csv", keep_default_na=False)
        assert read.token.tolist()[: len(tokens)] == tokens

    def test_what_is_no_character_is_written_out(self):
        assert exports._column(pd.Series(["a\ud800", None], dtype=object)).tolist() == ["a\\ud800", pd.NA]


class TestFiles:
    def test_which_there_are(self, written):
        directory, paths = written
        found = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
        assert found == {path.relative_to(directory).as_posix() for path in paths}
        tables = {name for name in found if name.startswith("tables/")}
        names = ("scorecard", "what-is-kept", "attention", "stability", "position", "fidelity")
        assert tables == {f"tables/{name}.{suffix}" for name in names for suffix in ("csv", "md", "tex")}
        figures = [path for path in paths if path.parent.name == "figures"]
        assert len(figures) == 7 * 3
        starts = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
        assert all(path.read_bytes().startswith(starts[path.suffix[1:]]) for path in figures)
        assert (directory / "figures" / "position-demo-sst2-mamba2-seed-1.pdf").exists()

    def test_the_csv_has_every_row_with_all_digits(self, written):
        directory, _ = written
        read = pd.read_csv(directory / "tables" / "fidelity.csv")
        (group,) = [group for group in groups(reported.small()) if group.verb == "fidelity"]
        (found,) = group.results()
        frame = found.result.to_frame().drop(columns="model")
        assert list(read.columns) == ["model", "key", "options", *frame.columns]
        pd.testing.assert_frame_equal(read[list(frame.columns)], frame, check_exact=True)

    def test_a_run_that_cannot_write_says_so_and_leaves_no_part(self, tmp_path, monkeypatch):
        exports.write(reported.report(), tmp_path)
        before = (tmp_path / "all.parquet").read_bytes()

        def full(source, target):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        refuses("cannot write to .*all.parquet: No space left", exports.write, reported.small(), tmp_path)
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["all.parquet"]
        assert (tmp_path / "all.parquet").read_bytes() == before

    @pytest.mark.usefixtures("painted")
    def test_a_figure_is_the_same_bytes_every_time_and_undated(self):
        result = reported.heatmap([["a", "b"]])
        for suffix in ("png", "svg", "pdf"):
            assert encode_figure(result.figure(), suffix) == encode_figure(result.figure(), suffix)
        root = xml.etree.ElementTree.fromstring(encode_figure(result.figure(), "svg"))
        assert not [one for one in root.iter() if one.tag.endswith("}date")]

    @pytest.mark.usefixtures("painted")
    def test_a_large_figure_is_a_png_in_the_page(self, monkeypatch):
        figure = reported.heatmap([["a"]]).figure
        assert data_uri(figure()).startswith("data:image/svg+xml;base64,")
        assert data_uri(figure(), vector=False).startswith("data:image/png;base64,")
        monkeypatch.setattr("ssmscope.render.pictures.MAX_SVG_BYTES", len(encode_figure(figure(), "svg")) - 1)
        assert data_uri(figure()).startswith("data:image/png;base64,")
        assert MAX_SVG_BYTES > 0


class TestTables:
    @settings(max_examples=200, deadline=None)
    @given(st.text(alphabet='&%$#_{}\\~^<>|"[]*ab é日', max_size=30))
    def test_latex_says_the_text_and_nothing_else(self, text):
        back = {value: key for key, value in LATEX.items() if value != key}
        escaped = for_latex(text).removeprefix("{}") if text.lstrip()[:1] in ("[", "*") else for_latex(text)
        read = ""
        while escaped:
            token = next((value for value in sorted(back, key=len, reverse=True) if escaped.startswith(value)), None)
            if token is None:
                assert escaped[0] not in "&%$#_{}\\~^"
            read += back[token] if token else escaped[0]
            escaped = escaped[len(token or "x") :]
        assert read == shorten(visible(text), MAX_CELL_CHARACTERS)

    def test_a_bracket_that_begins_a_cell_is_no_argument(self):
        assert for_latex("[CLS]") == "{}[CLS]" and for_latex("*") == "{}*" and for_latex("a[") == "a["

    def test_the_page_and_the_paper_give_the_same_numbers(self, written):
        directory, _ = written
        for group in groups(reported.small()):
            made = comparison(group, group.kinds[0])
            rows = (directory / "tables" / f"{group.name}.md").read_text().split("\n\n")[0].splitlines()
            assert len(rows) == 2 + len(made.rows)
            tex = (directory / "tables" / f"{group.name}.tex").read_text()
            assert len(re.findall(r" \\\\$", tex, re.MULTILINE)) == 1 + len(made.rows)
            columns = {len(re.findall(r"(?<!\\)&", line)) for line in tex.splitlines() if line.endswith(r"\\")}
            assert columns == {len(made.heads) + len(made.columns) - 1}

    def test_the_csv_is_one(self, written):
        directory, _ = written
        for path in (directory / "tables").glob("*.csv"):
            rows = list(csv.reader(io.StringIO(path.read_text())))
            assert len({len(row) for row in rows}) == 1


@pytest.mark.parametrize(
    ("values", "kind"),
    [([True, None], "flag"), ([True, 2.5], "number"), ([3, None], "number"), ([True, "x"], "text"), ([1, "x"], "text")],
)
def test_a_column_of_several_kinds_is_of_the_widest(values, kind):
    assert exports._kind(pd.Series(values, dtype=object)) == kind
