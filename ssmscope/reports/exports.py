"""Files of a report: one table of everything, tables of each analysis, and every figure.

    all.parquet               every row of every result
    tables/scorecard.*        a row per dimension of robustness, a column per model
    tables/NAME.csv           every row of one analysis, all digits
    tables/NAME.md, .tex      comparison of its models and methods, the best marked, for reading and for papers
    figures/NAME.png, .svg, .pdf

NAME comes from the analysis's heading, for figures also from the models. Files appear only when complete.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from ssmscope.api.writing import write_whole
from ssmscope.render import pictures
from ssmscope.render.figure import Frame, framed
from ssmscope.render.markup import to_latex, to_markdown
from ssmscope.reports import card_views
from ssmscope.reports.grouping import Group, LabelledResult, comparison, groups, unique_names
from ssmscope.reports.scorecard import Scorecard, scorecard
from ssmscope.reports.scores import report_scores
from ssmscope.reports.store import Report

if TYPE_CHECKING:
    from pandas import DataFrame, Series

ID_COLUMNS = ("verb", "heading", "model", "key", "options", "kind", "row")
"""Columns of `all.parquet` that identify a row."""


def write(report: Report, directory: str | os.PathLike[str]) -> list[Path]:
    """Write the report's tables and figures below `directory` and return their paths."""
    written = []
    for path, content in _files(report):
        write_whole(Path(directory, path), content)
        written.append(Path(directory, path))
    return written


def everything(report: Report) -> DataFrame:
    """Concatenate the `to_frame` tables of all results.

    Columns: verb, heading, model (shown names joined by ", "), key, options (JSON), kind, row (from 0 in each result's
    table), then the columns of all tables, missing where a table lacks them. A name with values of several types is
    split: NAME has the numbers, "NAME:text" the words and "NAME:flag" the booleans. The table of one analysis is
    `frame[frame.key == key].dropna(axis=1, how="all")`.
    """
    import pandas as pd

    frames = [_typed(_table(found)) for group in groups(report) for found in group.results()]
    if not frames:
        return pd.DataFrame({name: pd.Series(dtype="Int64" if name == "row" else "string") for name in ID_COLUMNS})
    names = list(dict.fromkeys(name for frame in frames for name in frame.columns))
    kinds = {name: {_kind(frame[name]) for frame in frames if name in frame} for name in names}
    # If numbers, words and flags share a name, the numbers keep it; otherwise it stays as it is.
    several = {name for name, found in kinds.items() if len(found) > 1}
    for at, frame in enumerate(frames):
        new = {name: name + _SUFFIX[_kind(frame[name])] for name in frame.columns if name in several}
        frames[at] = frame.rename(columns=new)
    whole = pd.concat(frames, ignore_index=True)
    return whole[[*ID_COLUMNS, *(name for name in whole.columns if name not in ID_COLUMNS)]]


_SUFFIX = {"number": "", "text": ":text", "flag": ":flag"}


def _table(found: LabelledResult) -> DataFrame:
    """Return a result's rows after the identifying columns; its own columns of the same names get the prefix `of_`, and
    its column `model` is dropped if the entry has one model."""
    frame = found.result.to_frame()
    if len(found.entry.models) == 1:
        frame = frame.drop(columns="model")
    frame = frame.rename(columns={name: f"of_{name}" for name in frame.columns if name in ID_COLUMNS})
    entry = found.entry
    identity = {
        "verb": entry.verb,
        "heading": entry.heading,
        "model": ", ".join(entry.models),
        "key": entry.key,
        "options": json.dumps(dict(entry.options), ensure_ascii=False, default=str),
        "kind": found.result.kind,
        "row": range(len(frame)),
    }
    for at, (name, value) in enumerate(identity.items()):
        frame.insert(at, name, value)
    return frame


def _typed(frame: DataFrame) -> DataFrame:
    """Convert every column that is not empty to a nullable type: strings, booleans, Int64 or Float64."""
    import pandas as pd

    empty = [name for name in frame.columns if frame[name].dtype.kind == "O" and frame[name].isna().all()]
    return pd.DataFrame({str(name): _column(frame[name]) for name in frame.columns if name not in empty})


def _column(column: Series) -> Series:
    kind = _kind(column)
    if kind == "flag":
        return column.astype("boolean")
    if kind == "number":
        return column.astype("Int64" if column.dtype.kind in "iu" else "Float64")
    # Some tokenizers give lone surrogates, which no file can hold.
    return column.map(lambda value: _encoded(str(value)).decode(), na_action="ignore").astype("string")


def _kind(column: Series) -> str:
    kinds = {"b": "flag", "i": "number", "u": "number", "f": "number"}
    if column.dtype.kind in kinds:
        return kinds[column.dtype.kind]
    values = column.dropna()
    if all(isinstance(value, bool | np.bool_) for value in values):
        return "flag"
    return "number" if all(isinstance(value, int | float | np.number) for value in values) else "text"


def _files(report: Report) -> Iterator[tuple[str, bytes]]:
    """Yield the path below the directory and the content of every file."""
    buffer = io.BytesIO()
    everything(report).to_parquet(buffer, index=False)
    yield "all.parquet", buffer.getvalue()
    for group in groups(report):
        for kind in group.kinds:
            name = group.name if len(group.kinds) == 1 else f"{group.name}--{kind}"
            table = comparison(group, kind)
            yield f"tables/{name}.csv", _csv(group, kind)
            yield f"tables/{name}.md", _encoded(to_markdown(table))
            yield f"tables/{name}.tex", _encoded(to_latex(table))
    card = scorecard(report_scores(report), report.baseline)
    if card is not None:
        table = card_views.table(card)
        yield "tables/scorecard.csv", _encoded(_card_rows(card).to_csv(index=False, lineterminator="\n"))
        yield "tables/scorecard.md", _encoded(to_markdown(table))
        yield "tables/scorecard.tex", _encoded(to_latex(table))
        with framed(Frame()) as frame:
            figure = card_views.draw(card, frame)
            for suffix in ("png", "svg", "pdf"):
                yield f"figures/scorecard.{suffix}", pictures.encode_figure(figure, suffix)
    every = [found for group in groups(report) for found in group.results()]
    for name, found in zip(unique_names([f"{found.entry.heading} {found.label}" for found in every]), every):
        figure = found.result.figure()
        for suffix in ("png", "svg", "pdf"):
            yield f"figures/{name}.{suffix}", pictures.encode_figure(figure, suffix)


def _card_rows(card: Scorecard) -> DataFrame:
    """Return a row per dimension and model with all digits."""
    import pandas as pd

    columns = ("value", "low", "high")
    rows = [
        {
            **{"dimension": row.heading, "score": row.name, "model": one.score.model, "examples": one.score.count},
            **{name: getattr(one.score, name) for name in columns},
            **{f"difference_{name}": getattr(one.difference, name, None) for name in columns},
            "state": one.state,
        }
        for row in card.rows
        for one in row.entries
        if one is not None
    ]
    return pd.DataFrame(rows)


def _csv(group: Group, kind: str) -> bytes:
    """Return every row of the group's results of a kind, after the columns model, key and options, as CSV."""
    import pandas as pd

    left_out = ["verb", "heading", "kind", "row"]
    frames = [_table(found).drop(columns=left_out) for found in group.results() if found.result.kind == kind]
    return _encoded(pd.concat(frames, ignore_index=True).to_csv(index=False, lineterminator="\n"))


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")
