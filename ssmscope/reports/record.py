"""Data of a report: its entries, each an analysis of one or several models with its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssmscope.api.results import Result

DONE, FAILED, LEFT_OUT, MISSING = "done", "failed", "left-out", "missing"
"""States of an entry: left out if the analysis has no answer for its model, missing if it has not run yet."""


@dataclass(frozen=True)
class Entry:
    """One job of a plan and its outcome."""

    verb: str
    heading: str
    models: tuple[str, ...]
    """Names that the report shows."""
    command: str
    """Shell command that reproduces it."""
    options: Mapping[str, Any]
    key: str
    state: str
    """"done", "failed", "left-out" or "missing"."""
    results: tuple[Result, ...]
    """All JSON results that the job wrote."""
    seconds: float | None
    error: str | None
    traceback: str | None


@dataclass(frozen=True)
class Report:
    """All data from which the page and the tables are made."""

    title: str
    entries: tuple[Entry, ...]
    provenance: Mapping[str, Any]
    """Versions, text of the plan, date, fingerprints of the models."""
