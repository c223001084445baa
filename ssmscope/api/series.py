"""Series as the input of analyses: a file or a table for a model that reads series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model
    from ssmscope.data.pixels import PixelData

SERIES_HELP = "Labelled series instead, for a model of numbers: npz, csv or parquet with labels."


def reads_series(models: Sequence[Any]) -> bool:
    """Return True if the models read series."""
    return all(getattr(each, "reads", None) == "series" for each in models)


def encoded_series(model: Model, given: Any, max_tokens: int | None = None) -> Batch:
    """Return the series of a file or a table as a batch; raise InputError if the model reads something else."""
    from ssmscope.data.series import read_series

    if model.reads != "series":
        raise InputError(f"{model.name} reads {model.reads}, not series of numbers: leave series=… out")
    found: Any = read_series(given).values
    return model.encode(found, max_tokens=max_tokens)


def labelled_series_of(values: Mapping[str, Any], models: Sequence[Model]) -> PixelData | None:
    """Return the labelled series that are asked for as such, or as the data of models that read series; else None.
    Raise InputError for both, for a split, and for series that are given to other models."""
    from ssmscope.data.series import labelled_series

    series = values.get("series")
    given = [each for each in (series, values["data"]) if each is not None]
    if series is None and not reads_series(models):
        return None
    if not given:
        raise InputError("no data; give series=…, a file of labelled series")
    if len(given) > 1 or values["split"] is not None:
        raise InputError("series=… cannot be combined with data=… or split=…; give one of them")
    if (other := next((each for each in models if each.reads != "series"), None)) is not None:
        raise InputError(f"{other.name} reads {other.reads}, not series of numbers: give data=… instead of series=…")
    return labelled_series(given[0])
