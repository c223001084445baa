"""Result of state overflow: accuracy, log-odds and answers with filler of growing length at each place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup
from pandas import DataFrame
from ssmscope.api.scores import LOWER, Changed, Score, ScoreMaker, average, first_wrong, lost, named
from ssmscope.attacks.closing import Accuracy, AccuracyCurve, closing, tidy
from ssmscope.core.bootstrap import Estimate
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.table import Cell, Line, Table, table, value_cell, with_interval


@dataclass(frozen=True)
class Filled(Accuracy):
    """Estimates with filler of one length at one place."""

    tokens: int
    added: float
    """Average number of tokens by which the texts are longer than without filler."""
    log_odds: Estimate
    """Mean of log p / (1 − p) of the true class, in natural logarithms."""
    shares: tuple[Estimate, ...]
    """Share of the examples answered with each class."""
    majority: Estimate
    """Largest of these shares: 1 for a model that gives every text the same class."""
    entropy: Estimate
    """−Σ share log₂ share, in bits: 0 for such a model."""


@dataclass(frozen=True)
class OverflowCurve:
    """Filler of growing length at one place."""

    where: str
    """"after" or "before" the text."""
    points: tuple[Filled, ...]
    half_length: Estimate | None
    """Shortest measured length at which half of the accuracy above chance is lost; None if it never is. The upper end
    of its interval can be infinite: beyond the measured lengths, or never."""


@dataclass(frozen=True)
class StateOverflow(AccuracyCurve, kind="overflow"):
    """Accuracy of a model with filler of growing length; `right` is (places, lengths, examples)."""

    classes: tuple[str, ...]
    chance: float
    """Share of the data's most frequent class."""
    curves: tuple[OverflowCurve, ...]
    gaps: tuple[Estimate, ...]
    """Per length the accuracy with filler before minus that with filler after the texts, paired; empty for one
    place."""
    filler: str
    """Longest filler that was inserted."""

    def verdict(self, at: int = 0) -> str:
        last = [f"{with_interval(curve.points[-1].accuracy)} {curve.where}" for curve in self.curves]
        tokens = self.curves[0].points[-1].tokens
        return f"accuracy {self.clean.value:.3f}; with {tokens:,} tokens of filler {' and '.join(last)} the text"

    @classmethod
    def compare(cls, results: Sequence[StateOverflow], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        more: list[str] = []
        for result, (label,) in zip(results, labels):
            for curve in result.curves:
                cells = {"without filler": Cell(result.clean)}
                cells |= {f"{point.tokens:,} tokens": Cell(point.accuracy) for point in curve.points if point.tokens}
                more += cells
                lines.append(Line((label, curve.where), cells, curve.where))
        return table(("model", "filler"), lines, more=more, note="Accuracy.")

    @property
    def headline(self) -> str:
        model = self.model_name
        last = [f"{curve.points[-1].accuracy.value:.3f} {curve.where}" for curve in self.curves]
        return (
            f"State overflow of {model}: accuracy {self.clean.value:.3f} without filler, with "
            f"{self.curves[0].points[-1].tokens:,} tokens of it {' and '.join(last)} the text; chance "
            f"{self.chance:.3f}"
        )

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        make = ScoreMaker(self, models)
        for at, curve in enumerate(self.curves):
            last = curve.points[-1]
            found = None if self.right is None else lost(self.right[at, 0], self.right[at, -1])
            name, harm = named("overflow.drop", curve.where, f"{last.tokens} tokens"), curve.where == "after"
            yield make(name, last.drop, LOWER, harm=harm, **average([found]))  # Filler before the text is the control.

    def changed_answers(self, texts: Callable[[], Sequence[str]]) -> Iterator[Changed]:
        for curve, right in zip(self.curves, () if self.right is None else self.right):
            for text, at in first_wrong(right, texts) if curve.where == "after" else ():
                yield Changed(text, None, f"{curve.points[1 + at].tokens} tokens of filler after the text")

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import curve

        lines = [[point.accuracy.value for point in one.points] for one in self.curves]
        return curve("accuracy by length of the filler", *lines)

    def to_frame(self) -> DataFrame:
        """A row per place and length. Columns: where, tokens, added, accuracy, drop (relative, in percent), log_odds,
        majority, entropy (bits), the share of each class as "share CLASS", and with both places gap (accuracy before −
        after, in both places' rows); the 95 % interval of each is in columns ending in _low and _high."""
        rows = []
        for curve in self.curves:
            for at, point in enumerate(curve.points):
                row = point.row(where=curve.where)
                row |= {f"share {name}": share for name, share in zip(self.classes, point.shares)}
                rows.append(row | ({"gap": self.gaps[at]} if self.gaps else {}))
        columns = ["where", "tokens", "added", "accuracy", "drop", "log_odds", "majority", "entropy"]
        return tidy(rows, [*columns, *(f"share {name}" for name in self.classes), "gap"])

    def blocks(self) -> Iterable[Block]:
        yield from self.opening()
        yield from (curve_table(curve, self.classes) for curve in self.curves)
        yield Prose(
            "drop: 1 − accuracy / accuracy without filler; log-odds: of the true class, mean; largest class: the most "
            "frequent answer and its share; entropy: of the answers, in bits.",
            "definition",
        )
        if self.gaps:
            last = self.curves[0].points[-1].tokens
            yield Prose(f"Accuracy before minus after at {last:,} tokens: {with_interval(self.gaps[-1])}.")
        yield from closing(self, self.notes)


def curve_table(curve: OverflowCurve, classes: Sequence[str]) -> Table:
    lines = []
    for point in curve.points:
        share, name = max(zip([e.value for e in point.shares], classes))
        cells = {
            **point.cells(),
            "log-odds": Cell(point.log_odds),
            "largest class": Cell(text=f"{name} {share:.2f}"),
            "entropy": value_cell(point.entropy, digits=2),
        }
        lines.append(Line((f"{point.tokens:,}",), cells))
    note = f"Half of the accuracy above chance is lost: {half_name(curve)}."
    return replace(table(("tokens",), lines), title=f"filler {curve.where} the text", note=note)


def half_name(curve: OverflowCurve) -> str:
    longest = curve.points[-1].tokens
    if curve.half_length is None:
        return f"never within {longest:,} tokens"
    ends = (curve.half_length.low, curve.half_length.high)
    low, high = (f"{end:,.0f}" if math.isfinite(end) else f"> {longest:,}" for end in ends)
    return f"at {curve.half_length.value:,.0f} tokens" + f" [{low}, {high}]" * curve.half_length.has_interval
