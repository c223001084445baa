"""Labels of examples as the numbers of a model's classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.data.pixels import PixelData
    from ssmscope.data.sequences import SequenceData
    from ssmscope.data.text import TextData


def class_ids(model: Model, data: PixelData | TextData | SequenceData) -> Int[np.ndarray, " examples"]:
    """Return the examples' labels as a classifier numbers its classes, (examples,) int64.

    Classes are matched by name, and by number where the model's have no names of their own.

    Raises:
        InputError: they do not match, or the model gives no classes.
    """
    model.check_classes(f"accuracy on {data.name}")
    ours, theirs = list(data.label_names), list(model.labels or ())
    labels = np.asarray(data.labels, dtype=np.int64)
    if set(ours) <= set(theirs):
        return np.array([theirs.index(name) for name in ours])[labels]
    unnamed = theirs == [f"LABEL_{i}" for i in range(len(theirs))]
    if unnamed and len(ours) == len(theirs):
        return labels
    given, known = (", ".join(names[:12]) for names in (ours, theirs))
    raise InputError(f"{data.name} has the classes {given}; {model.name} tells apart {known}: give data of these")


def word_ids(data: TextData, words: Sequence[str]) -> Int[np.ndarray, " examples"]:
    """Return the examples' labels as the numbers of a language model's answer words, (examples,) int64.

    Raises:
        InputError: there are not as many words as classes.
    """
    if len(words) != len(data.label_names):
        raise InputError(
            f"words are {', '.join(words)}; {data.name} has {len(data.label_names)} classes, "
            f"{', '.join(data.label_names[:12])}: give one for each, in this order"
        )
    return np.asarray(data.labels, dtype=np.int64)
