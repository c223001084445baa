"""Mapping of a file's labels, names or indices, to class ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ssmscope.data.rows import Row, whole
from ssmscope.errors import InputError

COLUMNS = ("label", "label_name", "label_index")
"""Columns that can hold labels; the second holds names, the third indices, the first either."""

NAMES, INDICES = "names", "indices"


def label_column(row: Row) -> str:
    """Return the name of a file's label column, given its first row."""
    return next((name for name in COLUMNS if name in row), COLUMNS[0])


def class_ids(
    labels: Sequence[str], names: Sequence[str], place: str | Path, column: str, *, as_written: bool = False
) -> list[int]:
    """Return the class of every label of a file, as an index into `names`.

    All labels of a file are read as names or all as indices, whichever fits them all: "1" can be both.

    Args:
        column: the label column; `label_name` and `label_index` decide the reading.
        as_written: the names were themselves labels of such a file, so labels that can be names are names.

    Raises:
        InputError: if a label is neither, names and indices are mixed, or the two readings give different classes.
    """
    by_name = {name: at for at, name in enumerate(names)}
    by_index = {str(at): at for at in range(len(names))}
    allowed = ", ".join(names)
    readings = {NAMES: by_name, INDICES: by_index}
    if column != COLUMNS[0]:
        readings = {NAMES: by_name} if column == COLUMNS[1] else {INDICES: by_index}
    known = {label for reading in readings.values() for label in reading}
    labels = [label if label in known else whole(label) for label in labels]
    distinct = dict.fromkeys(labels)
    unknown = next((label for label in distinct if label not in known), None)
    if unknown is not None:
        if column == COLUMNS[2]:
            allowed = f"0 to {len(names) - 1}"
        raise InputError(
            f"row {labels.index(unknown) + 1} of {place} has the label '{unknown:.60}'; allowed are {allowed}"
        )
    fitting = {what: reading for what, reading in readings.items() if all(label in reading for label in distinct)}
    if not fitting:
        name = next(label for label in distinct if label not in by_index)
        index = next(label for label in distinct if label not in by_name)
        raise InputError(
            f"{place} has the label '{name:.60}' (row {labels.index(name) + 1}), a class's name, and '{index}' (row "
            f"{labels.index(index) + 1}), a class's index; write all labels as names ({allowed}) or all as indices"
        )
    chosen = next(iter(fitting.values()))
    unclear = [label for label in distinct if len({reading[label] for reading in fitting.values()}) > 1]
    if unclear and not as_written:
        raise InputError(
            f"the label '{unclear[0]}' of {place} is the name of one class and the index of another (classes: "
            f"{allowed}); rename the column to label_name or to label_index to say which is meant"
        )
    return [chosen[label] for label in labels]


def sorted_names(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct labels sorted by name, or by value if all are integers."""
    distinct = set(labels)
    try:
        return tuple(sorted(distinct, key=lambda label: (int(label), label)))
    except ValueError:
        return tuple(sorted(distinct))
