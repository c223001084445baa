"""Similarity of scores while a model's weights are randomised: correlations part by part, and their views."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from markupsafe import Markup
from ssmscope.api.results import Result
from ssmscope.api.scores import LOWER, Score, ScoreMaker, named
from ssmscope.core.bootstrap import Estimate
from ssmscope.errors import index_of
from ssmscope.render.blocks import Block, Custom, Prose
from ssmscope.render.numbers import brackets, counted, number
from ssmscope.render.table import Cell, Line, Table, table, value_cell, with_interval

MEASURES = {"signed": "signed scores", "absolute": "absolute scores"}
"""Measures of similarity, with their names in the views."""

ALIKE = 0.5
"""Rank correlation from which on scores of a randomised model are like those of the trained one."""

TRAINED = "trained"
"""Name of the first point, with nothing randomised."""


@dataclass(frozen=True)
class SanityCheck(Result, kind="sanity"):
    """Rank correlation of each method's scores with those of the trained model, part by part."""

    methods: tuple[str, ...]
    parts: tuple[str, ...]
    """ "trained", and then the part that is randomised next."""
    texts: int
    values: np.ndarray
    """(methods, parts, texts, 2): signed scores and their absolute values; NaN where undefined."""
    estimates: np.ndarray
    """(methods, parts, 2, 3): mean over texts, low and high end of its interval."""

    @property
    def headline(self) -> str:
        groups: dict[str, list[str]] = {}
        for name in self.methods:
            found = self.estimate(name, self.parts[-1])
            value = "" if math.isnan(found.value) else f" ({number(found.value, 2)}{brackets(found, 2)})"
            groups.setdefault(self.state(name), []).append(f"{name}{value}")
        those = "them" if "passes" in groups else "the weights"
        said = {
            "passes": "depend{s} on the weights",
            "fails": f"hardly depend{{s}} on {those}",
            "undecided": "undecided",
        }
        told = "; ".join(
            f"{', '.join(groups[state])} {words.format(s='s' * (len(groups[state]) == 1))}"
            for state, words in {**said, "": "not defined"}.items()
            if state in groups
        )
        return f"Sanity check on {self.model_name}: {told} (correlation with {len(self.parts) - 1} parts randomised)"

    def state(self, method: str) -> str:
        """Return "passes" if the correlation with all parts randomised, with its interval, lies within ±`ALIKE`,
        "fails" if all of it lies beyond, "undecided" between, and "" if it is not defined."""
        found = self.estimate(method, self.parts[-1])
        ends = (found.low, found.high) if found.has_interval else (found.value, found.value)
        if math.isnan(found.value):
            return ""
        if max(map(abs, ends)) < ALIKE:
            return "passes"
        return "fails" if min(map(abs, ends)) >= ALIKE and ends[0] * ends[1] > 0 else "undecided"

    def verdict(self, at: int = 0) -> str:
        ends = [f"{name} {with_interval(self.estimate(name, self.parts[-1]))}" for name in self.methods]
        return f"correlation with all parts randomised: {', '.join(ends)}"

    def estimate(self, method: str, part: str, measure: str = "signed") -> Estimate:
        """Return the mean correlation once this part and those above it are randomised."""
        places = index_of("method", method, self.methods), index_of("part", part, self.parts)
        return Estimate(*self.estimates[(*places, index_of("measure", measure, tuple(MEASURES)))].tolist())

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        make, apart = ScoreMaker(self, models), counted(self.texts, "given text")
        for method in self.methods:
            found = self.estimate(method, self.parts[-1])
            yield make(named("sanity", method), found, LOWER, "", count=self.texts, apart=apart)

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import curve

        return curve("likeness of explanations as weights are randomised", self.estimates[0, :, 0, 0])

    def to_frame(self) -> pd.DataFrame:
        """Return a row per method, part and measure: columns method, randomised (how many parts), part (the newest of
        them), measure ("signed" or "absolute"), correlation, low, high (its 95 % interval), texts (where it is
        defined)."""
        rows = [
            (method, stage, part, measure, *self.estimates[a, stage, c].tolist(), int(defined[a, stage, c]))
            for defined in [(~np.isnan(self.values)).sum(2)]
            for a, method in enumerate(self.methods)
            for stage, part in enumerate(self.parts)
            for c, measure in enumerate(MEASURES)
        ]
        names = ["method", "randomised", "part", "measure", "correlation", "low", "high", "texts"]
        return pd.DataFrame(rows, columns=names)

    def blocks(self) -> Iterable[Block]:
        from ssmscope.render.html import grid

        yield from self.opening()
        # A terminal is too narrow for the intervals of several methods.
        yield Custom(
            lambda colours: self._table(intervals=False), lambda: grid(self._table()) + grid(self._table("absolute"))
        )
        yield Prose(
            f"Spearman's rank correlation of scores with those of the trained model, mean of "
            f"{counted(self.texts, 'text')}. A method whose scores stay alike does not depend on the weights: "
            f"it passes if the correlation with all parts randomised, with its interval, lies within ±{ALIKE}.",
            "definition",
        )

    def _table(self, measure: str = "signed", *, intervals: bool = True) -> Table:
        cell = Cell if intervals else value_cell
        lines = [
            Line((part,), {method: cell(self.estimate(method, part, measure)) for method in self.methods})
            for part in self.parts[1:]
        ]
        return replace(table(("randomised down to",), lines), title=MEASURES[measure])
