"""Rows of data sets on the Hugging Face hub, all of a split or the first ones, streamed.

A split may be cut as `datasets` writes it: of `test[:200]` the first 200 rows are read, and no more is downloaded.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from ssmscope.data.columns import renamed
from ssmscope.data.rows import SUFFIXES, Row, first_line, numbered
from ssmscope.errors import InputError

NETWORK_ERRORS: tuple[Any, ...] = (*HfHubHTTPError.__bases__, OfflineModeIsEnabled, OSError)
"""Errors of the hub and of the client that its library uses, requests or httpx."""
SECONDS_TO_REACH = 5.0
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?", re.ASCII)
CUT = re.compile(r"(.+)\[:(\d{1,9})\]")


class Part(NamedTuple):
    """Name of a split, and the number of first rows to read; None for all."""

    split: str
    first: int | None


def part_of(split: str) -> Part:
    """Return the part of a data set that a split, which may be cut, names. Raise InputError for no rows."""
    if (found := CUT.fullmatch(split)) is None:
        return Part(split, None)
    if int(found[2]) < 1:
        raise InputError(f"split '{split}' has no rows: ask for at least 1")
    return Part(found[1], int(found[2]))


def is_hub_id(data: Any) -> bool:
    """Return True for `OWNER/NAME` or `OWNER/NAME:CONFIGURATION` that is no file or directory here."""
    known = isinstance(data, str) and HUB_ID.fullmatch(data) is not None
    return known and not data.lower().endswith((".txt", *SUFFIXES)) and not os.path.exists(data)


def hub_rows(repository: str, configuration: str | None, split: str, advice: str) -> tuple[list[dict[str, Any]], Any]:
    """Return the rows of a split, and the features of its columns, None if these are unknown. Raise InputError, which
    ends with advice, if it cannot be read."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        said = f"{repository} comes from the hub through the package 'datasets', which is not installed; install it, or"
        raise InputError(f"{said} {advice}") from error
    # The client's messages about retries would bury the one line that says what to do.
    client = logging.getLogger("huggingface_hub")
    level = client.level
    client.setLevel(logging.ERROR)
    name, first = part_of(split)
    try:
        check_reach(repository)
        if first is None:
            found = datasets.load_dataset(repository, configuration, split=name)
        else:
            found = datasets.load_dataset(repository, configuration, split=name, streaming=True).take(first)
        return list(found), getattr(found, "features", None)
    except (*NETWORK_ERRORS, RuntimeError, ValueError) as error:
        raise InputError(f"{repository} could not be read from the hub ({first_line(error)}); {advice}") from error
    finally:
        client.setLevel(level)


def check_reach(repository: str, kind: str = "dataset") -> None:
    """Raise ConnectionError if the hub is out of reach and nothing of a data set or model in its cache: its clients
    would ask for minutes. With `HF_HUB_OFFLINE` set, they do not ask."""
    hub, file = HfApi(), "README.md" if kind == "dataset" else "config.json"
    try:
        if kind == "dataset":
            hub.dataset_info(repository, timeout=SECONDS_TO_REACH, expand=["sha"])
        else:
            hub.model_info(repository, timeout=SECONDS_TO_REACH, expand=["sha"])
    except OfflineModeIsEnabled:
        return
    except NETWORK_ERRORS as error:
        answered = getattr(error, "response", None) is not None
        if not answered and try_to_load_from_cache(repository, file, repo_type=kind) is None:
            raise ConnectionError("the hub is out of reach") from error


def labelled_rows(data: str, split: str) -> tuple[list[Row], tuple[str, ...] | None]:
    """Return the rows of a data set by its id, and the names of its classes in their order, which are its labels; None
    if its labels have no names."""
    found, features = _rows_of(data, split)
    rows = numbered(found, f"{data} ({split})")
    names: Sequence[str] = getattr(renamed([features or found[0]], data)[0].get("label"), "names", ())
    for row in rows if names else ():
        row["label"] = _named(row.get("label"), names)
    return rows, tuple(names) or None


def text_rows(data: str, split: str) -> list[Row]:
    """Return the rows of a data set by its id."""
    return numbered(_rows_of(data, split)[0], f"{data} ({split})")


def _rows_of(data: str, split: str) -> tuple[list[dict[str, Any]], Mapping[str, Any] | None]:
    repository, _, configuration = data.partition(":")
    advice = "give OWNER/NAME or OWNER/NAME:CONFIGURATION and a split of it, or a file"
    rows, features = hub_rows(repository, configuration or None, split, advice)
    if not rows:
        raise InputError(f"{data} ({split}) holds no rows; give at least one text")
    return rows, features


def _named(label: Any, names: Sequence[str]) -> Any:
    return names[label] if isinstance(label, int) and 0 <= label < len(names) else label
