"""What a report holds: its entries, each an analysis of one or several models, with all that they gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssmscope.api.results import Result

DONE, FAILED, LEFT_OUT, MISSING = "done", "failed", "left-out", "missing"
"""The states of an entry; what is left out has no answer for its model, what is missing has not run yet."""


@dataclass(frozen=True)
class Entry:
    """One job of a plan, and what became of it."""

    verb: str
    heading: str
    models: tuple[str, ...]
    """The names that the report shows."""
    command: str
    """The shell line that re-makes it."""
    options: Mapping[str, Any]
    key: str
    state: str
    """"done", "failed", "left-out" or "missing"."""
    results: tuple[Result, ...]
    """Every JSON result that the job wrote."""
    seconds: float | None
    error: str | None
    traceback: str | None


@dataclass(frozen=True)
class Report:
    """Everything that a page and its tables are made of."""

    title: str
    entries: tuple[Entry, ...]
    provenance: Mapping[str, Any]
    """Versions, the plan's text, the date, the models' fingerprints."""
