"""Tables of what commands printed, where nothing else was kept of their runs: a line of results/outputs.jsonl has a
table's name, the command, where it ran with how many training seeds, and the cells as they were printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import running

RESULTS = Path(__file__).with_name("results") / "outputs.jsonl"


def __getattr__(name: str) -> Callable[[], list[str]]:
    """Return the function that returns the lines of a table."""
    found = next((row for row in running.read(RESULTS) if row["table"] == name), None)
    if found is None:
        raise AttributeError(name)
    head, *rows = [re.sub(" +", " ", f"| {' | '.join(row)} |") for row in (found["columns"], *found["rows"])]
    return lambda: [head, "|---" * len(found["columns"]) + "|", *rows]
