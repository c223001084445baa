"""Result of a measurement of fidelity: numbers per method with their intervals, curves, differences, tables."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from ssmscope.api.results import Result
from ssmscope.api.scores import HIGHER, Score, ScoreMaker, named
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.ties import descending, highest
from ssmscope.errors import InputError, did_you_mean, index_of
from ssmscope.interp.fidelity.measures import LOGIT_SCALE, RANDOM, display_name, layer_of, more_is_better
from ssmscope.interp.labelled import target_name
from ssmscope.render.blocks import Block, Custom, Prose
from ssmscope.render.markup import to_latex, to_markdown
from ssmscope.render.numbers import counted, with_ties
from ssmscope.render.table import Cell, Line, Table, table, with_interval

STYLES = ("markdown", "latex", "csv")
UNKNOWN = Estimate(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Fidelity(Result, kind="fidelity"):
    """Effect on the output of hiding the tokens that each method names, text by text and on average."""

    methods: tuple[str, ...]
    measures: tuple[str, ...]
    value: str
    """Quantity f: "probability", "log-probability" or "logit"."""
    texts: np.ndarray
    """(texts,) int64: numbers of the measured texts in the data; texts that are too short are left out."""
    predicted: np.ndarray
    """(texts,) int64: the target, by default the class or token predicted on the clean text; a continuation's first."""
    clean: np.ndarray
    """(texts,) f of the clean text."""
    values: np.ndarray
    """(methods, texts, measures); NaN where a text has no rationale."""
    random: np.ndarray
    """(texts, measures), the mean over the random rankings."""
    rankings: np.ndarray
    """(rankings, measures): the mean over the texts for each random ranking."""
    estimates: np.ndarray
    """(methods + 1, measures, 3): mean, low and high end of its interval; the random rankings last."""
    paired: np.ndarray
    """(pairs, measures, 3): the differences of `pairs`."""
    shares: np.ndarray
    """(points,) the shares q of hidden tokens."""
    curve: np.ndarray
    """(methods + 1, 2, points, 3): mean f along MoRF and LeRF with its interval; the random rankings last."""
    marked: float | None
    """Mean share of tokens that people marked; None without rationales."""
    notes: tuple[str, ...]

    @property
    def rows(self) -> tuple[str, ...]:
        """Methods, followed by the random rankings."""
        return (*self.methods, RANDOM)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Pairs whose differences, first − second, are in `paired`."""
        return tuple(itertools.combinations(self.rows, 2))

    @property
    def data(self) -> str:
        """Name of the data."""
        return str(self.provenance["data"]["name"])

    @property
    def headline(self) -> str:
        start = f"Fidelity of {counted(len(self.methods), 'method')} on {self.model_name}"
        ranked = self._ranked()
        low, high = (f"{self.estimate(ranked[end]).value:.3f}".replace("-", "−") for end in (-1, 0))
        if where := self._best_named():
            said = f"{'best ' * (len(ranked) > 1)}ΔA {high} of {where}"
        else:
            said = f"ΔA {' to '.join(dict.fromkeys((low, high)))}, no method clearly best"
        return f"{start}: {said}" + ", no better than random rankings" * (not self.difference(ranked[0]).low > 0)

    def verdict(self, at: int = 0) -> str:
        best, clearly = self.best("delta"), "" if self._best_named() else "not clearly "
        found = f"ΔA {with_interval(self.estimate(best[0]))} of {' and '.join(best)}"
        return f"{found}, {clearly}the best of {len(self.methods)}"

    def _ranked(self) -> list[str]:
        """Return the methods by falling ΔA."""
        means = self.estimates[:-1, self.measures.index("delta"), 0]
        return [self.methods[at] for at in descending(means)]

    def _shown_rows(self) -> list[str]:
        """Return the rows of the views: the best method by ΔA, the random rankings, and the others."""
        best, *others = self._ranked()
        return [best, RANDOM, *others]

    def _best_named(self) -> str:
        """Name the method with the largest ΔA and those indistinguishable from it; "" if these are too many."""
        first, *others = self._ranked()
        alike = [name for name in others if not self.difference(first, name).low > 0]
        return with_ties([first, *alike], len(self.methods))

    @classmethod
    def compare(cls, results: Sequence[Fidelity], labels: Sequence[Sequence[str]]) -> Table:
        lines = [
            replace(line, labels=(label, result.data, *line.labels))
            for result, (label,) in zip(results, labels)
            for line in result._lines()
        ]
        measures = dict.fromkeys(measure for result in results for measure in result._shown())
        note = "ΔA depends on the scale of each model's logits: compare methods by it, not models."
        return table(("model", "data", "method"), lines, note=note, **_directions(measures))

    def estimate(self, method: str, measure: str = "delta") -> Estimate:
        """Return a measure of a method, or of "random", with its interval.

        Raises:
            InputError: when there is no such method or measure.
        """
        place = index_of("method", method, self.rows), index_of("measure", measure, self.measures)
        return Estimate(*self.estimates[place].tolist())

    def difference(self, method: str, other: str = RANDOM, measure: str = "delta") -> Estimate:
        """Return a measure of a method minus that of another, paired, with its interval.

        Raises:
            InputError: when there is no such method or measure.
        """
        a, b = (index_of("method", name, self.rows) for name in (method, other))
        m = index_of("measure", measure, self.measures)
        if a == b:
            return Estimate(0.0, 0.0, 0.0)
        found = self.paired[self.pairs.index((self.rows[min(a, b)], self.rows[max(a, b)])), m].tolist()
        return Estimate(*found) if a < b else Estimate(-found[0], -found[2], -found[1])

    def best(self, measure: str) -> tuple[str, ...]:
        """Return the methods with the best mean, several where they are equal; never the random rankings."""
        place = index_of("measure", measure, self.measures)
        means = self.estimates[:-1, place, 0]
        best = highest(means if more_is_better(measure) else -means)
        return tuple(name for name, first in zip(self.methods, best) if first)

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        make, place = ScoreMaker(self, models), self.measures.index("delta")
        for number, method in enumerate(self.methods):
            values = self.values[number, :, place]
            found, known = Estimate(*self.estimates[number, place].tolist()), ~np.isnan(values)
            each: dict[str, Any] = dict(above=np.where(known, values, 0.0), below=known, count=len(values))
            yield make(named("fidelity", method), found, HIGHER, "", apart=LOGIT_SCALE, **each)

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import curve

        what = "output while tokens are hidden, the most relevant and (dashed) the least relevant first"
        return curve(what, *self.curve[0, :, :, 0])

    def to_frame(self) -> pd.DataFrame:
        """Return a row per method (and "random") and measure: columns method, measure, value, low, high (the 95 %
        interval), texts, and, for the random rankings, spread: the standard deviation of their own means."""
        spread = self.rankings.std(0, ddof=1)
        rows = []
        for number, method in enumerate(self.rows):
            for place, measure in enumerate(self.measures):
                texts = int((~np.isnan(self.random[:, place])).sum())
                own = spread[place] if method == RANDOM else math.nan
                rows.append((method, measure, *self.estimates[number, place].tolist(), texts, own))
        return pd.DataFrame(rows, columns=["method", "measure", "value", "low", "high", "texts", "spread"])

    def curves(self) -> pd.DataFrame:
        """Return a row per method, ranking ("MoRF", "LeRF") and share q of hidden tokens: mean f with its interval."""
        rows = [
            (method, order, share, *self.curve[number, at, point].tolist())
            for number, method in enumerate(self.rows)
            for at, order in enumerate(("MoRF", "LeRF"))
            for point, share in enumerate(self.shares.tolist())
        ]
        return pd.DataFrame(rows, columns=["method", "ranking", "q", "mean", "low", "high"])

    def differences(self) -> pd.DataFrame:
        """Return a row per pair of methods ("random" is the second) and measure: the paired difference."""
        rows = [
            (*pair, measure, *self.paired[number, place].tolist())
            for number, pair in enumerate(self.pairs)
            for place, measure in enumerate(self.measures)
        ]
        return pd.DataFrame(rows, columns=["method", "other", "measure", "difference", "low", "high"])

    def table(self, *, style: str = "markdown") -> str:
        """Return methods × measures with the best of each marked, as "markdown", "latex" or "csv"."""
        rows = [((name,), tuple(_cell(self, name, measure) for measure in self.measures)) for name in self.rows]
        columns = tuple(f"{display_name(one)} {'↑' if more_is_better(one) else '↓'}" for one in self.measures)
        return _written(Table(("method",), self.measures if style == "csv" else columns, tuple(rows)), style)

    def blocks(self) -> Iterable[Block]:
        from ssmscope.render.html import grid

        yield from self.opening()
        # A terminal is too narrow for the intervals of all measures: it has those of ΔA below.
        yield Custom(lambda colours: self._measures(intervals=False), lambda: grid(self._measures(intervals=True)))
        data, options = self.provenance["data"], self.provenance["options"]
        how = "deleted" if options["mode"] == "delete" else f"replaced by {_filled(options['replacement'])}"
        yield Prose(
            f"{counted(len(self.texts), 'text')} of {data['name']} ({data['split']}), tokens {how}, f the {self.value} "
            f"of {target_name(options)}; {len(self.rankings)} random rankings."
        )
        lines = []
        for method in self._shown_rows():
            beside = {} if method == RANDOM else {"minus random": Cell(self.difference(method))}
            lines.append(Line((method,), {"ΔA": Cell(self.estimate(method)), **beside}))
        yield table(("method",), lines)
        if layers := [measure for measure in self.measures if layer_of(measure) is not None]:
            yield Prose("Spearman's correlation with the effect of knocking each token out in one layer alone:")
            lines = self._lines(layers)
            yield table(("method",), lines, **_directions(layers))
        yield from (Prose(f"Note: {note}.") for note in self.notes)

    def _measures(self, *, intervals: bool) -> Table:
        return table(("method",), self._lines(intervals=intervals), **_directions(self._shown()))

    def _shown(self) -> list[str]:
        """Return the measures of the whole model, which share one table."""
        return [measure for measure in self.measures if layer_of(measure) is None]

    def _lines(self, measures: Sequence[str] | None = None, *, intervals: bool = True) -> list[Line]:
        """Return a line per method; the random rankings are not compared with the methods."""
        lines, peers = [], object()
        for method in self._shown_rows():
            found = {display_name(measure): self.estimate(method, measure) for measure in measures or self._shown()}
            if not intervals:
                found = {name: Estimate(one.value, math.nan, math.nan) for name, one in found.items()}
            cells = {name: Cell(one) for name, one in found.items()}
            lines.append(Line((method,), cells, object() if method == RANDOM else peers))
        return lines


def _directions(measures: Iterable[str]) -> dict[str, Any]:
    """Return the columns of `table` in which more is better, and those in which less is."""
    more, less = ([display_name(one) for one in measures if more_is_better(one) == better] for better in (True, False))
    return {"more": more, "less": less}


def _filled(replacement: str) -> str:
    names = {"mean": "the mean embedding", "zero": "a zero embedding", "pad": "the padding token"}
    return names.get(replacement, f"the token {replacement!r}")


def fidelity_table(results: Sequence[Fidelity], *, measure: str = "delta", style: str = "markdown") -> str:
    """Return a measure of methods × data sets, as in Baleen's Table 2: a row per method and model, a column per data
    set and their average, the best method of each model and data set marked. The random rankings stand below the
    methods.

    Args:
        results: one per model and data set. A model column comes in when there are several models.
        measure: "delta", "morf", "lerf", "comprehensiveness", "sufficiency"; with rationales "token_f1", "iou_f1",
            "auprc".
        style: "markdown", "latex" (booktabs) or "csv", which has the intervals in columns of their own.

    Raises:
        InputError: no result, two of the same model and data set, an unknown measure or style.
    """
    if not results:
        raise InputError("no result was given; give at least one that fidelity_auc made")
    found: dict[tuple[str, str], Fidelity] = {}
    for result in results:
        place = (result.model_name, result.data)
        if place in found:
            raise InputError(f"two results are of {place[0]} on {place[1]}; give one for each model and data set")
        found[place] = result
    models, sets = (list(dict.fromkeys(place[i] for place in found)) for i in (0, 1))
    rows = []
    for model in models:
        own = {name: found[model, name] for name in sets if (model, name) in found}
        methods = list(dict.fromkeys(method for result in own.values() for method in result.rows))
        methods.sort(key=lambda method: method == "random")
        averages = {method: _average(own, sets, method, measure) for method in methods}
        means = {method: mean for method, mean in averages.items() if mean is not None and method != "random"}
        first = highest(np.array([*means.values()]) * (1 if more_is_better(measure) else -1)) if means else ()
        top = [method for method, is_first in zip(means, first) if is_first]
        for method in methods:
            there = [one if (one := own.get(name)) is not None and method in one.rows else None for name in sets]
            cells = [Cell(UNKNOWN) if one is None else _cell(one, method, measure) for one in there]
            if len(sets) > 1:
                mean = averages[method]
                alone = UNKNOWN if mean is None else Estimate(mean, math.nan, math.nan)
                cells.append(Cell(alone, best=method in top))
            rows.append(((model, method)[len(models) == 1 :], tuple(cells)))
    columns = (*sets, *(["average"] if len(sets) > 1 else []))
    return _written(Table(("model", "method")[len(models) == 1 :], columns, tuple(rows)), style)


def _cell(result: Fidelity, method: str, measure: str) -> Cell:
    return Cell(result.estimate(method, measure), best=method in result.best(measure))


def _average(own: dict[str, Fidelity], sets: Sequence[str], method: str, measure: str) -> float | None:
    """Return a method's mean over the data sets, for a model that was measured on all of them."""
    if any(name not in own or method not in own[name].rows for name in sets):
        return None
    return sum(own[name].estimate(method, measure).value for name in sets) / len(sets)


def _written(found: Table, style: str) -> str:
    """Write a table in a style; CSV has plain numbers with the ends of their intervals, and where a row is best."""
    if style not in STYLES:
        raise InputError(f"unknown style {style!r}; allowed are {', '.join(STYLES)}{did_you_mean(str(style), STYLES)}")
    if style != "csv":
        shown = replace(found, heads=tuple(map(str.capitalize, found.heads)))
        return to_latex(shown, plain=True) if style == "latex" else to_markdown(shown)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*found.heads, *(name + end for name in found.columns for end in ("", "_low", "_high")), "best_in"])
    for names, cells in found.rows:
        ends = [end for cell in cells for one in [cell.found or UNKNOWN] for end in (one.value, one.low, one.high)]
        best = ";".join(name for name, cell in zip(found.columns, cells) if cell.best)
        writer.writerow([*names, *("" if math.isnan(end) else end for end in ends), best])
    return out.getvalue()
