"""Rows of a report's scorecard, which analyses declare. They stand in the order of the report's plan."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ssmscope.api.analyses import analyses


class Dimension(NamedTuple):
    """Row of a scorecard: its heading, the pattern of its score's name, and what the score is."""

    heading: str
    pattern: str
    measure: str
    apart: str = ""
    """Reason why no two models are compared, where it holds for all scores of the row (`Score.apart`)."""


def dimensions(scores: Sequence[str] = ()) -> list[Dimension]:
    """Return the rows that analyses declare, those of an analysis together: first of these scores, in their order."""

    def place(rows: Sequence[Dimension]) -> int:
        patterns = "|".join(row.pattern for row in rows)
        return next((at for at, name in enumerate(scores) if re.fullmatch(patterns, name)), len(scores))

    return [row for rows in sorted((each.dimensions for each in analyses().values()), key=place) for row in rows]


def dimension_of(score: str) -> Dimension | None:
    """Return the row of a score by its name, with or without a bracket; None if it has none."""
    rows = dimensions()
    exact = next((row for row in rows if re.fullmatch(row.pattern, score)), None)
    return exact or next((row for row in rows if re.split(r"\\\[", row.pattern)[0].replace("\\", "") == score), None)
