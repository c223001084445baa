"""Rows of a report's scorecard, which analyses declare."""

from __future__ import annotations

import re
from typing import NamedTuple

from ssmscope.api.analyses import analyses


class Dimension(NamedTuple):
    """Row of a scorecard: its heading, the pattern of its score's name, and what the score is."""

    heading: str
    pattern: str
    measure: str
    row: int = 100
    """Place among the rows, which stand in rising order; by default after ours."""
    apart: str = ""
    """Reason why no two models are compared, where it holds for all scores of the row (`Score.apart`)."""


def dimensions() -> list[Dimension]:
    """Return the rows of a scorecard that all analyses declare, in their order."""
    every = [row for declared in analyses().values() for row in declared.dimensions]
    return sorted(every, key=lambda row: row.row)


def dimension_of(score: str) -> Dimension | None:
    """Return the row of a score by its name, with or without a bracket; None if it has none."""
    rows = dimensions()
    exact = next((row for row in rows if re.fullmatch(row.pattern, score)), None)
    return exact or next((row for row in rows if re.split(r"\\\[", row.pattern)[0].replace("\\", "") == score), None)
