"""Scores of a report's results, kept in a file for the report that is compared with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from ssmscope.api.jsonable import decode_fields, encode_fields
from ssmscope.api.scores import SHARE_UNIT, Score
from ssmscope.api.writing import write_whole
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.reports.store import Report

SCORES = "scores.json"
"""File of a report's scores in its directory."""


def report_scores(report: Report) -> list[Score]:
    """Return the scores of all results of a report in its order."""
    return [one for entry in report.entries for result in entry.results for one in result.card_scores(entry.models)]


def write_scores(every: Iterable[Score], directory: str | os.PathLike[str]) -> Path:
    """Write scores to `scores.json` in a directory, atomically, and return its path."""
    path = Path(directory, SCORES)
    document = {"scores": [encode_fields(one) for one in every]}
    write_whole(path, json.dumps(document, allow_nan=False, ensure_ascii=False) + "\n")
    return path


def read_scores(where: str | os.PathLike[str]) -> list[Score]:
    """Read the scores of a report from its directory or its `scores.json`. Raise InputError if it has none."""
    path = Path(where)
    path = path / SCORES if path.is_dir() else path
    try:
        document = json.loads(path.read_bytes())
        return [_checked(decode_fields(one, Score)) for one in document["scores"]]
    except OSError as error:
        raise InputError(
            f"there are no scores at {path}: {error.strerror or error}; give the directory of a report that has run"
        ) from error
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise InputError(f"{path} does not hold a report's scores: {error}") from error


def _checked(score: Score) -> Score:
    """Return a score that was read, "%" of older files as "share". Raise ValueError if its examples are not
    (examples, 2) finite numbers."""
    each = score.examples
    if each is not None and not (each.dtype.kind in "biuf" and each.ndim == 2 and each.shape[1] == 2):
        raise ValueError(f"the examples of {score.name} are {each.dtype} {each.shape}, not numbers (examples, 2)")
    if each is not None and not np.isfinite(each).all():
        raise ValueError(f"the examples of {score.name} are not finite")
    return replace(score, unit=SHARE_UNIT) if score.unit == "%" else score
