"""Result of influence: its reach by distance, and the similarity of tokens by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.api.results import TABLE_ROWS, Result
from ssmscope.core.bootstrap import Estimate, with_intervals
from ssmscope.errors import InputError, did_you_mean
from ssmscope.probes.influence.reach import QUANTILES, SHARES, Reach
from ssmscope.probes.influence.similarity import MEASURES, PARTS, Similarity
from ssmscope.render.blocks import Block
from ssmscope.render.table import Cell, Line, Table, frame_table, number_cell, short_cell, table

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Influence(Result, kind="influence"):
    """Reach of the output and of each layer, and similarity of tokens by layer."""

    of: str
    """The measured output y, "hidden" or "logits"; for a layer it is the mixer's output."""
    positions: str
    """Measured positions t: "last", "all" or "chosen"."""
    unit: str
    """ "tokens" or "pixels"."""
    lengths: np.ndarray
    """(texts,) int64: number of tokens."""
    recent: int
    """Number of last tokens that the views call recent."""
    reaches: tuple[Reach, ...]
    """Reach of the whole model, "output", and of each measured layer."""
    similarity: Similarity
    notes: tuple[str, ...]

    @property
    def output(self) -> Reach:
        """Reach of the whole model."""
        return self.reaches[0]

    @property
    def layers(self) -> tuple[Reach, ...]:
        """Reach of each layer's mixer; empty unless layers are measured."""
        return self.reaches[1:]

    @property
    def of_own_tokens(self) -> bool:
        """Return True if effective contexts count only the texts' own tokens, because the fit is poor somewhere."""
        return any(reach.of_own_tokens for reach in self.reaches)

    @property
    def noun(self) -> str:
        """Noun for the inputs: "texts", "images", "random sequences" or "random images"."""
        drawn = self.provenance["options"]["length"] is not None
        if self.unit == "pixels":
            return "random images" if drawn else "images"
        return "random sequences" if drawn else "texts"

    @property
    def one(self) -> str:
        """Singular with its article: "a text", "an image"."""
        return "an image" if self.unit == "pixels" else "a text"

    @property
    def counted(self) -> str:
        """Number and length of the inputs."""
        low, high, number = int(self.lengths.min()), int(self.lengths.max()), len(self.lengths)
        noun = self.noun if number > 1 else self.noun.removesuffix("s")
        length = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        return f"{number:,} {noun} of {length} {self.unit if high > 1 else self.unit.removesuffix('s')}"

    @property
    def headline(self) -> str:
        return f"Influence on the output of {self.model_name}: {self.verdict()}"

    def verdict(self, at: int = 0) -> str:
        half, most = (self.output.effective_context(share, within=True) for share in (0.5, 0.9))
        if math.isnan(half):
            return "there is none"
        if self.of_own_tokens:
            length = float(np.median(self.lengths))
            return f"half of it in the last {half:,.0f} of {length:,.0f} {self.unit}, 90 % in the last {most:,.0f}"
        context = self.output.effective_context(0.9)
        held = f"within {context:,.0f} {self.unit}" if math.isfinite(context) else "not within the texts' length"
        return f"{decay_in_words(self.output)}, 90 % of it {held}"

    @classmethod
    def compare(cls, results: Sequence[Influence], labels: Sequence[Sequence[str]]) -> Table:
        own, lines = any(result.output.of_own_tokens for result in results), []
        for result, (label,) in zip(results, labels):
            reach = result.output
            cells = {"rate λ": Cell(reach.decay.rate, digits=None)}
            cells["decay length"] = Cell(reach.decay.length, digits=None)
            cells[f"share of the last {result.recent}"] = Cell(reach.recent(result.recent))
            cells["90 % held within"] = number_cell(reach.effective_context(0.9, within=own))
            lines.append(Line((label, reach.place), cells))
        note = "Decay length and context are in tokens, the rate is per token."
        return table(("model", "of"), lines, note=note + " Held: of the influence of the text's own tokens." * own)

    def summary(self) -> DataFrame:
        """Return a row for the output and each layer.

        Columns: place, rate (λ per token), decay_length (tokens), r2, fit_from, fit_to (distances); recent (the share
        of the last tokens); context_50, context_90, context_95 (tokens, medians over texts, infinite if not reached,
        missing if the fit is poor) and not_reached_50, … (texts); error (the median relative standard error of a norm);
        the 95 % intervals of rate, decay_length and recent in columns ending in _low and _high.
        """
        import pandas as pd

        return pd.DataFrame([_summary(reach, self.recent) for reach in self.reaches])

    def distances(self, place: str | int = "output") -> DataFrame:
        """Return a row per distance t − s of the output or of a layer: columns distance, pairs, log_norm, norm, share,
        within (the share of the last 1 + distance tokens), each with _low and _high, the quantiles q05 … q95 of the
        norm, the relative error of one norm, and noisy, the share of norms below the float noise.

        Raises:
            InputError: when there is no such place.
        """
        import pandas as pd

        reach = self._reach(place)
        columns: dict[str, Any] = {"distance": np.arange(len(reach.pairs)), "pairs": reach.pairs}
        for name in ("log_norm", "norm", "share", "within"):
            values = getattr(reach, name)
            columns |= {name + end: values[:, at] for at, end in enumerate(("", "_low", "_high"))}
        columns |= {f"q{round(100 * q):02d}": reach.quantiles[:, at] for at, q in enumerate(QUANTILES)}
        return pd.DataFrame({**columns, "error": reach.error, "noisy": reach.noisy})

    def to_frame(self) -> DataFrame:
        """Return everything as a row per number: columns part, place, distance, measure, value, low, high, count.

        First the parts "decay" (rate, decay_length, intercept, r2), "context" (the median of the effective context for
        each share, low and high being the quartiles over texts, count the texts that reach it), "recency" (the share of
        the last tokens) and "stream" and "mixer" (cosine, centred, spread); then "distance": log_norm, norm, share,
        within, with the number of (text, t) as count.
        """
        import pandas as pd

        rows: list[tuple[Any, ...]] = []
        for reach in self.reaches:
            rows += _decay_rows(reach, self.recent)
        for part in PARTS:
            places = self.similarity.places if part == "stream" else self.similarity.places[1:-1]
            for place in places:
                for measure in MEASURES:
                    found = self.similarity.estimate(place, measure, part)
                    rows.append((part, place, None, measure, found.value, found.low, found.high, len(self.lengths)))
        for reach in self.reaches:
            for measure in ("log_norm", "norm", "share", "within"):
                for distance, (value, low, high) in enumerate(getattr(reach, measure).tolist()):
                    count = len(self.lengths) if measure == "within" else int(reach.pairs[distance])
                    rows.append(("distance", reach.place, distance, measure, value, low, high, count))
        names = ["part", "place", "distance", "measure", "value", "low", "high", "count"]
        return pd.DataFrame(rows, columns=names).astype({"distance": "Int64", "count": "Int64"})

    def blocks(self) -> Iterable[Block]:
        from ssmscope.probes.influence.words import sentences

        yield from self.opening(*sentences(self), notes=self.notes)
        yield self._table()
        yield replace(frame_table(self.to_frame(), limit=TABLE_ROWS), wide=True)

    def _table(self) -> Table:
        """Return a table of decay, recency, effective context and similarity of the output and the layers."""
        reaches, own = {reach.place: reach for reach in self.reaches}, self.of_own_tokens
        lines = []
        for place in self.similarity.places:
            cells: dict[str, Cell] = dict.fromkeys(
                ("decay length", "R²", f"last {self.recent}", *(f"{100 * share:.0f} %" for share in SHARES)), Cell()
            )
            if place in reaches:
                reach = reaches[place]
                cells |= {"decay length": short_cell(reach.decay.length.value), "R²": _three_decimals(reach.decay.r2)}
                cells[f"last {self.recent}"] = _three_decimals(reach.recent(self.recent).value)
                for share in SHARES:
                    context = reach.effective_context(share, within=own)
                    cells[f"{100 * share:.0f} %"] = short_cell(np.rint(context), ">" if math.isinf(context) else "")
            cells |= {name: _three_decimals(self.similarity.estimate(place, name).value) for name in MEASURES}
            if place.isdigit():
                cells["mixer's cosine"] = _three_decimals(self.similarity.estimate(place, part="mixer").value)
            lines.append(Line((f"layer {place}" if place.isdigit() else place,), cells))
        contexts = [reach.effective_context(share, within=own) for reach in self.reaches for share in SHARES]
        held = ", ".join(f"{100 * share:.0f} %" for share in SHARES)
        note = f"{held}: how many of the last {self.unit} hold that share of the influence"
        note += f" of {self.one}'s own {self.unit}." if own else "."
        if any(map(math.isinf, contexts)):
            note += f" > not reached: at least half of the {self.noun} are too short for that share."
        return table(("place",), lines, note=note)

    def _reach(self, place: str | int) -> Reach:
        known = {reach.place: reach for reach in self.reaches}
        if str(place) not in known:
            hint = "" if self.layers else "; layers are measured with at='layers'"
            raise InputError(
                f"there is no {place!r}; allowed are {', '.join(known)}{did_you_mean(str(place), known)}{hint}"
            )
        return known[str(place)]


def _three_decimals(value: float) -> Cell:
    """Return the cell of a number without an interval, with three decimal places."""
    return Cell(Estimate(value, math.nan, math.nan))


def decay_in_words(reach: Reach) -> str:
    """Describe the decay of the influence in a few words."""
    if not reach.decay.defined:
        return "no decay fitted"
    if math.isinf(reach.decay.length.value):
        return "no decay with distance"
    return f"decay length {reach.decay.length.value:.3g}"


def _summary(reach: Reach, recent: int) -> dict[str, Any]:
    decay = reach.decay
    row: dict[str, Any] = {"place": reach.place}
    for name, found in (("rate", decay.rate), ("decay_length", decay.length), ("recent", reach.recent(recent))):
        row |= with_intervals(**{name: found})
        if name == "decay_length":
            row |= {"r2": decay.r2, "fit_from": decay.first, "fit_to": decay.last}
    for share in SHARES:
        row[f"context_{100 * share:.0f}"] = reach.effective_context(share)
    for share in SHARES:
        row[f"not_reached_{100 * share:.0f}"] = reach.not_reached(share)
    known = reach.error[~np.isnan(reach.error)]
    return {**row, "error": float(np.median(known)) if len(known) else math.nan}


def _decay_rows(reach: Reach, recent: int) -> Iterable[tuple[Any, ...]]:
    decay, texts = reach.decay, len(reach.context)
    nothing = (math.nan, math.nan)
    for name, found in (("rate", decay.rate), ("decay_length", decay.length)):
        yield "decay", reach.place, None, name, found.value, found.low, found.high, texts
    for name, value in (("intercept", decay.intercept), ("r2", decay.r2)):
        yield "decay", reach.place, None, name, value, *nothing, texts
    for name, distance in (("fit_from", decay.first), ("fit_to", decay.last)):
        yield "decay", reach.place, None, name, float(distance), *nothing, texts
    for share in SHARES:
        middle, low, high = (reach.effective_context(share, quantile) for quantile in (0.5, 0.25, 0.75))
        reached = int((~np.isnan(reach.context[:, 0])).sum()) - reach.not_reached(share)
        yield "context", reach.place, None, f"{100 * share:.0f} %", middle, low, high, reached
    found = reach.recent(recent)
    yield "recency", reach.place, None, f"last {recent}", found.value, found.low, found.high, texts
