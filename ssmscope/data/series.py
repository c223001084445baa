"""Series of numbers, from arrays, files and tables, with their labels."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ssmscope.core.text_files import parse_json
from ssmscope.data.columns import renamed
from ssmscope.data.pixels import PixelData
from ssmscope.data.rows import (
    SUFFIXES,
    Row,
    checked_column,
    checked_label,
    first_line,
    given_rows,
    label_column,
    read_rows,
)
from ssmscope.errors import InputError

COLUMN, STEP = "series", "step"
"""Columns of a table: each row's series, its numbers or its name; and the place of a row's step in it."""
ARRAYS = (".npy", ".npz")


@dataclass(frozen=True, eq=False)
class Series:
    """Series (length, channels) of one name, perhaps of several lengths, and their labels if these are given."""

    name: str
    values: list[np.ndarray]
    labels: list[Any] | None = None
    label_names: Sequence[str] | None = None


def is_series(given: Any) -> bool:
    """Return True for what `read_series` reads: a name of a file, or a table."""
    return isinstance(given, str | os.PathLike) or given_rows(given) is not None


def read_series(given: Any) -> Series:
    """Read the series of a file or a table, with their labels.

    An npy file holds numbers (length, channels) or (series, length, channels); an npz file such an array, called
    `series` if there are others, and perhaps arrays `labels` and `label_names`. A csv, tsv, jsonl or parquet file, or a
    DataFrame, has a row for each series, with its numbers in the column `series`, [1, 2, …] or [[1, 2], …]; or a row
    for each step, with a column for each channel, and a column `series` that names the row's series unless there is
    only one. Its steps are in the order of the column `step`, if there is one, else of the rows. A column `label` has
    the series' labels.

    Raises InputError if the file cannot be read, or holds anything else.
    """
    rows = None if isinstance(given, str | os.PathLike) else given_rows(given)
    if rows is not None:
        return _of_rows(rows, "given")
    path = Path(given)
    if path.suffix.lower() not in (*ARRAYS, *SUFFIXES):
        raise InputError(f"{path} is no file of series; its name must end in {', '.join((*ARRAYS, *SUFFIXES))}")
    return _of_arrays(path) if path.suffix.lower() in ARRAYS else _of_rows(read_rows(path), path.stem)


def labelled_series(
    values: Any,
    labels: Sequence[int | str] | None = None,
    label_names: Sequence[str] | None = None,
    *,
    name: str | None = None,
) -> PixelData:
    """Return labelled series as data of a classifier: `evaluate`, `ablate`, `fidelity`, `position` and `noise` read it.

    Args:
        values: numbers (examples, length, channels), an array or a tensor; or a file or a table (`read_series`).
        labels: class id of each example, or its name; by default those of the file or table.
        label_names: names of the classes in the order of the logits; needed for names, by default those in order.
        name: name of the data in results; by default that of the file, or "series".

    Raises InputError for another shape, numbers that are not finite, labels that do not fit, and files that cannot be
    read.
    """
    if is_series(values):
        found = read_series(values)
        lengths = sorted({len(each) for each in found.values})
        if len(lengths) > 1:
            raise InputError(f"series of {found.name} have {lengths[0]} to {lengths[-1]} steps; data need one length")
        labels = found.labels if labels is None else labels
        if labels is None:
            raise InputError(f"{found.name} has no labels; give a column 'label', or in an npz file an array 'labels'")
        names = found.label_names if label_names is None else label_names
        return labelled_series(np.stack(found.values), labels, names, name=name or found.name)
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if array.ndim != 3 or 0 in array.shape or not np.issubdtype(array.dtype, np.floating):
        said = f"the series are {array.shape} {array.dtype}; give floats (examples, length, channels)"
        raise InputError(f"{said}, all of one length")
    if not np.isfinite(array).all():
        raise InputError("the series hold numbers that are not finite")
    if labels is None:
        raise InputError("the series have no labels; give one for each")
    given = [label.item() if hasattr(label, "item") else label for label in labels]
    if len(given) != len(array):
        raise InputError(f"there are {len(given)} labels for {len(array)} series; give one for each")
    classes = tuple(map(str, label_names if label_names is not None else sorted({*map(str, given)}, key=_by_number)))
    ids = [classes.index(label) if label in classes else label for label in given]
    for label in ids:
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < len(classes):
            raise InputError(f"the label {label!r} is none of the classes {', '.join(classes)}; give names or numbers")
    return PixelData(name or "series", "given", array, np.array(ids, dtype=np.int64), classes, (1, array.shape[1]))


def _by_number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (-1, name)


def _of_arrays(path: Path) -> Series:
    try:
        found = np.load(path, allow_pickle=False)
        held: dict[str, Any] = {COLUMN: found} if isinstance(found, np.ndarray) else dict(found)
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}; give the path of a file of series") from error
    except (OSError, ValueError, EOFError, MemoryError, SyntaxError, zipfile.BadZipFile, RuntimeError) as error:
        raise InputError(f"{path} could not be read as {path.suffix[1:]}: {first_line(error)}") from error
    held = dict(renamed([held], path)[0])
    labels, names = (held.pop(name, None) for name in ("labels", "label_names"))
    if COLUMN not in held and len(held) != 1:
        raise InputError(f"{path} holds the arrays {', '.join(held) or 'none'}; call that of the series '{COLUMN}'")
    values = held.get(COLUMN, next(iter(held.values())))
    if values.ndim not in (2, 3) or 0 in values.shape or values.dtype.kind not in "fiu":
        said = f"the series of {path} are {values.shape} {values.dtype}"
        raise InputError(f"{said}; give numbers (length, channels) or (series, length, channels)")
    values = values if values.dtype.kind == "f" else values.astype(np.float64)
    listed = [None if each is None else np.atleast_1d(each).tolist() for each in (labels, names)]
    return Series(path.stem, list(values if values.ndim == 3 else values[None]), *listed)


def _of_rows(rows: Sequence[Row], name: str) -> Series:
    label = column if (column := label_column(rows[0])) in rows[0] else None
    if _is_list(rows[0].get(COLUMN)):
        labels = None if label is None else [checked_label(row, label) for row in rows]
        return Series(name, [_listed(row) for row in rows], labels)
    channels = [column for column in rows[0] if column not in (COLUMN, STEP, label)]
    if not channels:
        raise InputError(f"{rows[0].place} has no numbers; give a column of lists '{COLUMN}', or one for each channel")
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get(COLUMN), []).append(row)
    values, labels = [], []
    for of, own in groups.items():
        ordered = sorted(own, key=lambda row: _number(row, STEP)) if STEP in own[0] else own
        values.append(np.array([[_number(row, channel) for channel in channels] for row in ordered]))
        if label is not None:
            labels.append(checked_label(own[0], label))
            if odd := next((row for row in own if checked_label(row, label) != labels[-1]), None):
                raise InputError(f"{odd.where} has another label than the earlier steps of series {of}; give it one")
    return Series(name, values, labels if label is not None else None)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray) or (isinstance(value, str) and value.lstrip().startswith("["))


def _listed(row: Row) -> np.ndarray:
    """Return the numbers in a row's list, (length, channels)."""
    value = checked_column(row, COLUMN)
    try:
        value = parse_json(value) if isinstance(value, str) else value
        value = [list(step) for step in value] if _is_list(value[0]) else value
        found = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise InputError(
            f"{row.where} has {value!r:.40} as its {COLUMN}; give a list of numbers at each step"
        ) from error
    found = found[:, None] if found.ndim == 1 else found
    if found.ndim != 2 or 0 in found.shape:
        raise InputError(f"{row.where} has numbers {found.shape} as its {COLUMN}; give a list of numbers at each step")
    return found


def _number(row: Row, column: str) -> float:
    value = checked_column(row, column)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        said = f"{row.where} has {value!r:.40} in the column '{column}'"
        raise InputError(f"{said}, which is read as a channel; give a number, or leave the column out") from error
