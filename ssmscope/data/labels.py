"""Match of the labels of data with the classes of a model or of other data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssmscope.errors import InputError

COLUMNS = ("label", "label_name", "label_index")
"""Columns that can hold labels; the second holds names, the third indices, the first either."""


class Matched(NamedTuple):
    """Class of each label, an index, and how labels and classes were matched, in words; empty if by name."""

    classes: dict[str, int]
    how: str


def is_unnamed(classes: Sequence[str]) -> bool:
    """Return True for transformers' names of classes without one, LABEL_0, LABEL_1, …"""
    return list(classes) == [f"LABEL_{at}" for at in range(len(classes))]


def match_labels(
    labels: Sequence[str],
    classes: Sequence[str],
    place: str | Path,
    column: str = COLUMNS[0],
    *,
    as_written: bool = False,
    numbers: Sequence[str] | None = None,
) -> Matched | None:
    """Match labels with classes: all labels are names, all are indices ("1" can be both), all begin one class each,
    whatever the case, or, where the classes are unnamed, the labels' own numbers count. None if nothing fits.

    Args:
        column: the label column; `label_name` and `label_index` decide the reading.
        as_written: the classes were themselves labels of such a file, so labels that can be names are names.
        numbers: all labels in the order in which their source numbers them; None if it does not.

    Raises:
        InputError: names and indices both fit, and give different classes.
    """
    labels = list(dict.fromkeys(labels))
    by_name = {name: at for at, name in enumerate(classes)}
    by_index = {str(at): at for at in range(len(classes))}
    readings = dict(zip(COLUMNS, ([by_name, by_index], [by_name], [by_index])))[column]
    fitting = [reading for reading in readings if all(label in reading for label in labels)]
    unclear = [label for label in labels if len({reading[label] for reading in fitting}) > 1]
    if unclear and not as_written:
        raise InputError(
            f"the label '{unclear[0]}' of {place} is the name of one class and the index of another (classes: "
            f"{', '.join(classes)}); rename the column to label_name or to label_index to say which is meant"
        )
    if fitting:
        found, how = fitting[0], "" if fitting[0] is by_name else "by number"
    elif column != COLUMNS[2] and (found := _begun(labels, classes)):
        how = "by their beginnings"
    elif numbers is not None and is_unnamed(classes) and len(numbers) == len(classes):
        found, how = {label: at for at, label in enumerate(numbers)}, "by number"
    else:
        return None
    shown = ", ".join(f"{label} = {classes[found[label]]}" for label in labels[:12] if how)
    return Matched(found, how and f"the labels of {place} are matched with the model's classes {how}: {shown}")


MAX_REPEATED = 0.05
"""Share of an example set from which on repeated texts are noted."""


def data_notes(data: Any) -> list[str]:
    """Return notes on labelled data: one class alone, repeated texts."""
    labels, texts = ({*map(int, getattr(data, "labels", ()))}, getattr(data, "texts", ()))
    if len(getattr(data, "label_names", ())) == 0 or not labels:
        return []
    found = []
    if len(labels) == 1 and len(data) > 1:
        found.append(f"{data.name} has one class alone, {data.label_names[min(labels)]}: accuracy is that of one class")
    if (repeated := len(texts) - len({*texts})) > MAX_REPEATED * len(texts):
        found.append(f"{repeated:,} of the {len(texts):,} texts of {data.name} are repeated: intervals are too narrow")
    return found


def _begun(labels: Sequence[str], classes: Sequence[str]) -> dict[str, int]:
    """Return the class that begins with each label, whatever the case, as Movies' POS begins positive; empty unless
    each label begins one class, another for each."""
    found = {}
    for label in labels:
        own = [at for at, name in enumerate(classes) if name == label]
        begun = own or [at for at, name in enumerate(classes) if name.lower().startswith(label.lower())]
        if len(begun) != 1 or (label.isdecimal() and not own):
            return {}
        found[label] = begun[0]
    return found if len({*found.values()}) == len(found) else {}
