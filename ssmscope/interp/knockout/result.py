"""Answers with edges cut: probabilities and logits by window of layers, part or head, and their views."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.ties import descending
from ssmscope.render import numbers
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.table import Cell, Line, Table, in_percent, table
from ssmscope.render.tokens import shorten, visible

NAMED_HEADS = 12
NAMED_ANSWERS = 3
MIN_CHANGE, CARRIED = 0.05, 0.9
"""Smallest relative change of a probability that is told of, and share of it that layers reach that carry it alone."""


@dataclass(frozen=True)
class Cut:
    """Layers, first to last by the model's own numbers, in which edges are cut; optionally one head and part only."""

    first: int
    last: int
    head: int | None = None
    part: str = ""
    attention: bool = field(default=False, compare=False)
    """True if the layer only has softmax attention."""

    @property
    def name(self) -> str:
        layers = f"layer {self.first}" if self.first == self.last else f"layers {self.first}–{self.last}"
        part = self.part or "attention" * self.attention
        return layers + (f", head {self.head}" if self.head is not None else "") + f" ({part})" * bool(part)


@dataclass(frozen=True)
class Knockout(Result, kind="knockout"):
    """Answer's probability and logit with edges cut, for every text, source and cut. A regression's probabilities are
    NaN, its numbers are the logits."""

    tokens: tuple[tuple[str, ...], ...]
    answers: tuple[str, ...]
    """One per text."""
    sources: tuple[str, ...]
    spans: tuple[tuple[tuple[int, ...], ...], ...]
    """Positions of every source in every text."""
    target: str
    targets: tuple[tuple[int, ...], ...]
    by: str
    roads: str
    cuts: tuple[Cut, ...]
    """Cuts, the first in all layers."""
    probability: np.ndarray
    """(texts,), with nothing cut."""
    logit: np.ndarray
    probabilities: np.ndarray
    """(texts, sources, cuts)."""
    logits: np.ndarray
    changes: np.ndarray
    """(sources, cuts, 3): the mean over texts of the probability's relative change, p_cut / p − 1, or of the number's
    change, and its interval."""
    attends: bool
    """True if the model has attention of which nothing is cut."""

    @property
    def of_numbers(self) -> bool:
        """True if the answers are a regression's numbers."""
        return bool(np.isnan(self.probability).all())

    @property
    def knocked_out(self) -> str:
        return {"states": "edges", "convolution": "the convolution", "both": "edges and the convolution"}[self.roads]

    @property
    def headline(self) -> str:
        told = "; ".join(self._effect(number) for number in range(len(self.sources[:NAMED_ANSWERS])))
        told += f"; {len(self.sources) - NAMED_ANSWERS} more" * (len(self.sources) > NAMED_ANSWERS)
        return f"Knockout of {self.knocked_out} to “{shorten(self.target, 30)}” on {self.model_name}: {told}"

    def _effect(self, source: int) -> str:
        """Say to what the answer's probability goes with the edges cut in all layers, and in those that count most."""
        worst, without = self._largest(source), f"without “{shorten(self.sources[source], 20)}”"
        every, most = (float(self.changes[source, cut, 0]) for cut in (0, worst))
        least = MIN_CHANGE * (float(np.abs(self.logit).mean()) if self.of_numbers else 1)
        if len(self.answers) == 1:
            start, found = (self.logit, self.logits) if self.of_numbers else (self.probability, self.probabilities)
            ends = float(start[0]), *(float(found[0, source, cut]) for cut in (0, worst))
            before, after, there = (numbers.number(end) if self.of_numbers else f"{end:.3f}" for end in ends)
            moved = "falls" if ends[1] < ends[0] else "rises"
            said = f"“{visible(self.answers[0])}” {moved} from {before} to {after} {without}"
            said = said if after != before else f"“{visible(self.answers[0])}” stays at {after} {without}"
        else:
            after, there = (self._said(self.change(source, cut), interval=False) for cut in (0, worst))
            said = f"the answers of {len(self.answers)} texts change by {after} {without}"
        if not worst or abs(every) < least or abs(most) < least:
            return f"{said} in all layers"
        carries = every * most > 0 and abs(most) >= CARRIED * abs(every)
        how = "alone carries it" if carries else "counts most"
        return f"{said} in all layers; {self.cuts[worst].name} {how} ({there})"

    def verdict(self, at: int = 0) -> str:
        found = []
        for number, source in enumerate(self.sources):
            every, worst = self._said(self.change(number, 0)), self._largest(number)
            most = self._said(self.change(number, worst), interval=False)
            found.append(f"“{shorten(source, 20)}” {every} in all layers, most in {self.cuts[worst].name} ({most})")
        start = numbers.number(float(self.logit[0])) if self.of_numbers else f"{self.probability[0]:.3g}"
        before = f"of {start}" if len(self.answers) == 1 else "of each text"
        what = "change of the number" if self.of_numbers else "relative change of the answer's probability"
        return f"{what} {before}: {'; '.join(found)}"

    def _said(self, found: Estimate, *, interval: bool = True) -> str:
        if not self.of_numbers:
            return in_percent(found, interval=interval)
        return numbers.number(found.value) + numbers.brackets(found) * interval

    def _cell(self, source: int, cut: int) -> Cell:
        found = self.change(source, cut)
        return Cell(found, digits=None) if self.of_numbers else _percent(found)

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers in which edges were cut."""
        return tuple(sorted({end for cut in self.cuts for end in (cut.first, cut.last)}))

    def change(self, source: int, cut: int) -> Estimate:
        """Return the mean relative change of the answer's probability, −1 where nothing of it is left, or the mean
        change of a regression's number."""
        return Estimate(*map(float, self.changes[source, cut]))

    def _largest(self, source: int) -> int:
        """Return the number of the cut with the largest change, apart from the one in all layers."""
        ends = [(cut.first, cut.last) for cut in self.cuts]
        whole = [bool(cut.part) and own == ends[0] and len(ends) > 2 for cut, own in zip(self.cuts, ends)]
        changes = np.where([True, *whole[1:]], -1.0, np.abs(self.changes[source, :, 0]))
        return int(descending(changes, 1.0)[0])

    def to_frame(self) -> pd.DataFrame:
        """Return a row per text, source and cut, with the answer's probability and logit, or its number, before and
        after."""
        rows = []
        for (text, source, at), after in np.ndenumerate(self.probabilities):
            cut, before = self.cuts[at], float(self.probability[text])
            where = (text, self.answers[text], self.sources[source], cut.first, cut.last, cut.head, cut.part)
            logits = float(self.logit[text]), float(self.logits[text, source, at])
            rows.append((*where, before, float(after), float(after) / before - 1, *logits))
        columns = ["text", "answer", "source", "first", "last", "head", "part"]
        columns += ["probability", "probability_cut", "change", "logit", "logit_cut"]
        found = pd.DataFrame(rows, columns=columns)
        if not self.of_numbers:
            return found
        found = found.drop(columns=["probability", "probability_cut"])
        found = found.rename(columns={"logit": "number", "logit_cut": "number_cut"})
        return found.assign(change=found["number_cut"] - found["number"])

    @classmethod
    def compare(cls, results: Sequence[Knockout], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            for number, source in enumerate(result.sources):
                worst = result._largest(number)
                every, most = (result._cell(number, cut) for cut in (0, worst))
                cells = {"all layers": every, "most in": Cell(text=result.cuts[worst].name), "there": most}
                lines.append(Line((label, source), cells))
        return table(("model", "from"), lines)

    def blocks(self) -> Iterable[Block]:
        has = [f"is {numbers.number(v)}" for v in self.logit] if self.of_numbers else None
        has = [f"has the probability {p:.3f}" for p in self.probability] if has is None else has
        answers = [*zip(self.answers, has)][:NAMED_ANSWERS]
        told = [f"“{visible(answer)}” {what} with nothing cut." for answer, what in answers]
        told[-1] += f" Below: {'' if self.of_numbers else 'relative '}changes."
        yield from self.opening(*told)
        rows = [at for at, cut in enumerate(self.cuts) if cut.head is None]
        if self.by == "head":
            largest = np.abs(self.changes[..., 0]).max(0)
            largest[rows] = -math.inf
            rows += [int(at) for at in descending(largest, 1.0)[:NAMED_HEADS] if largest[at] >= 0]
        lines = [Line((self.cuts[at].name,), {s: self._cell(n, at) for n, s in enumerate(self.sources)}) for at in rows]
        cut = f"with {self.knocked_out} to “{self.target}” cut"
        note = f"Relative change of the probability p {cut}, p′ / p − 1; −100 %: nothing is left."
        yield table(("cut in",), lines, note=f"Change of the number {cut}." if self.of_numbers else note)
        if self.attends:
            yield Prose("Other parts of the model also read earlier tokens; these are not cut.", "note")


def _percent(found: Estimate) -> Cell:
    ends = found.times(100)
    small = 0.001 <= abs(ends.value) < 1
    return Cell(ends, text=f"{numbers.number(ends.value)} %" if small else in_percent(found, interval=False))
