"""The numbers of a report as files: one table of everything, a table of each analysis, and every figure.

    all.parquet               every row of every result
    tables/NAME.csv           every row of one analysis, all digits
    tables/NAME.md, .tex      its models and methods beside one another, the best marked, for reading and for papers
    figures/NAME.png, .svg, .pdf

NAME is made of the analysis's heading, of figures of its heading and models. Files get their names when they are
complete.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.api.writing import write_whole
from ssmscope.errors import InputError
from ssmscope.render import pictures
from ssmscope.render.markup import to_latex, to_markdown
from ssmscope.reports.grouping import Found, Group, compared, groups, unique
from ssmscope.reports.record import Report

if TYPE_CHECKING:
    from pandas import DataFrame, Series

ABOUT = ("verb", "heading", "model", "key", "options", "kind", "row")
"""The columns of `all.parquet` that every row has."""


def write(report: Report, directory: str | os.PathLike[str]) -> list[Path]:
    """Write the report's tables and figures below `directory`, and return their paths.

    Raises:
        InputError: the directory cannot be written to.
    """
    root = Path(directory)
    written = []
    try:
        for path, content in _files(report):
            write_whole(root / path, content)
            written.append(root / path)
    except OSError as error:
        raise InputError(f"cannot write to {root}: {error.strerror or error}") from error
    return written


def everything(report: Report) -> DataFrame:
    """Every row of every result, as its `to_frame` has them, below one another.

    Columns: verb, heading, model (the shown names, joined by ", "), key, options (JSON), kind, row (from 0, in its
    result's table), then those of all the tables, missing where a table has none of that name. A name that stands for
    numbers in one table and for words in another is two columns: NAME has the numbers, "NAME:text" the words, and
    "NAME:flag" what is yes or no. The table of one analysis is `frame[frame.key == key].dropna(axis=1, how="all")`.
    """
    import pandas as pd

    frames = []
    for group in groups(report):
        for found in group.found():
            frame = _typed(_table(found))
            frames.append(frame)
    if not frames:
        return pd.DataFrame({name: pd.Series(dtype="Int64" if name == "row" else "string") for name in ABOUT})
    names = list(dict.fromkeys(name for frame in frames for name in frame.columns))
    kinds = {name: {_kind(frame[name]) for frame in frames if name in frame} for name in names}
    # Where numbers, words and flags share a name, the numbers keep it; alone, each keeps it.
    several = {name for name, found in kinds.items() if len(found) > 1}
    for at, frame in enumerate(frames):
        new = {name: name + _SUFFIX[_kind(frame[name])] for name in frame.columns if name in several}
        frames[at] = frame.rename(columns=new)
    whole = pd.concat(frames, ignore_index=True)
    return whole[[*ABOUT, *(name for name in whole.columns if name not in ABOUT)]]


_SUFFIX = {"number": "", "text": ":text", "flag": ":flag"}


def _table(found: Found) -> DataFrame:
    """A result's rows behind those columns that say what they are of; its own columns of such a name get a prefix, but
    for `model` where it is of one."""
    frame = found.result.to_frame()
    if len(found.entry.models) == 1:
        frame = frame.drop(columns="model")
    frame = frame.rename(columns={name: f"of_{name}" for name in frame.columns if name in ABOUT})
    entry = found.entry
    about = {
        "verb": entry.verb,
        "heading": entry.heading,
        "model": ", ".join(entry.models),
        "key": entry.key,
        "options": json.dumps(_plain(entry.options), ensure_ascii=False, default=str),
        "kind": found.result.kind,
        "row": range(len(frame)),
    }
    for at, (name, value) in enumerate(about.items()):
        frame.insert(at, name, value)
    return frame


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _typed(frame: DataFrame) -> DataFrame:
    """Every column that is not empty as words, flags, whole numbers or floats of 64 bits, each of which can miss."""
    import pandas as pd

    empty = [name for name in frame.columns if frame[name].dtype.kind == "O" and frame[name].isna().all()]
    return pd.DataFrame({str(name): _column(frame[name]) for name in frame.columns if name not in empty})


def _column(column: Series) -> Series:
    kind = _kind(column)
    if kind == "flag":
        return column.astype("boolean")
    if kind == "number":
        return column.astype("Int64" if column.dtype.kind in "iu" else "Float64")
    return column.map(_word, na_action="ignore").astype("string")


def _word(value: Any) -> str:
    # A lone surrogate, which some tokenizers give, is no character that a file can hold.
    return str(value).encode(errors="backslashreplace").decode()


def _kind(column: Series) -> str:
    kinds = {"b": "flag", "i": "number", "u": "number", "f": "number"}
    if column.dtype.kind in kinds:
        return kinds[column.dtype.kind]
    values = column.dropna()
    if all(isinstance(value, bool | np.bool_) for value in values):
        return "flag"
    return "number" if all(isinstance(value, int | float | np.number) for value in values) else "text"


def _files(report: Report) -> Iterator[tuple[str, bytes]]:
    """Every file by its path below the directory."""
    buffer = io.BytesIO()
    everything(report).to_parquet(buffer, index=False)
    yield "all.parquet", buffer.getvalue()
    for group in groups(report):
        for kind in group.kinds:
            name = group.name if len(group.kinds) == 1 else f"{group.name}--{kind}"
            table = compared(group, kind)
            yield f"tables/{name}.csv", _csv(group, kind)
            yield f"tables/{name}.md", _encoded(to_markdown(table))
            yield f"tables/{name}.tex", _encoded(to_latex(table))
    every = [found for group in groups(report) for found in group.found()]
    for name, found in zip(unique([f"{found.entry.heading} {found.label}" for found in every]), every):
        figure = found.result.figure()
        for suffix in ("png", "svg", "pdf"):
            yield f"figures/{name}.{suffix}", pictures.drawn(figure, suffix)


def _csv(group: Group, kind: str) -> bytes:
    """Every row of the group's results of a kind, behind the columns model, key and those options that differ."""
    import pandas as pd

    frames = []
    for found in group.found():
        if found.result.kind == kind:
            frames.append(_table(found).drop(columns=["verb", "heading", "kind", "row"]))
    return _encoded(pd.concat(frames, ignore_index=True).to_csv(index=False, lineterminator="\n"))


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")
