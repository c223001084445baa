"""Result of influence: its reach by distance, and the similarity of tokens by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from ssmscope.api.results import TABLE_ROWS, Result
from ssmscope.api.scores import Score, ScoreMaker, named
from ssmscope.core.bootstrap import Estimate, with_intervals
from ssmscope.errors import InputError, did_you_mean
from ssmscope.probes.influence.reach import QUANTILES, SHARES, Reach
from ssmscope.probes.influence.similarity import MEASURES, Similarity
from ssmscope.render.blocks import Block
from ssmscope.render.html import folded_away
from ssmscope.render.numbers import brackets, number
from ssmscope.render.table import Cell, Line, Table, frame_table, number_cell, short_cell, table

NOUNS = {"pixels": ("images", "random images"), "steps": ("series", "random series")}
"""Nouns for inputs of a unit, given and drawn."""


@dataclass(frozen=True)
class Influence(Result, kind="influence"):
    """Reach of the output and of each layer, and similarity of tokens by layer."""

    of: str
    """The measured output y, "hidden" or "logits"; for a layer it is the mixer's output."""
    positions: str
    """Measured positions t: "last", "all" or "chosen"."""
    unit: str
    """ "tokens", "pixels" or "steps"."""
    lengths: np.ndarray
    """(texts,) int64: number of tokens."""
    recent: int
    reaches: tuple[Reach, ...]
    """Reach of the whole model, "output", and of each measured layer."""
    similarity: Similarity
    notes: tuple[str, ...]

    @property
    def output(self) -> Reach:
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
        """Noun for the inputs: "texts", "images", "series", "random sequences" or "random images"."""
        given, drawn = NOUNS.get(self.unit, ("texts", "random sequences"))
        return given if self.provenance["options"]["length"] is None else drawn

    @property
    def one(self) -> str:
        """Singular with its article: "a text", "an image"."""
        return {"pixels": "an image", "steps": "a series"}.get(self.unit, "a text")

    @property
    def counted(self) -> str:
        """Number and length of the inputs."""
        low, high, number = int(self.lengths.min()), int(self.lengths.max()), len(self.lengths)
        noun = self.noun if number > 1 or self.unit == "steps" else self.noun.removesuffix("s")
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

    def summary(self) -> pd.DataFrame:
        """Return a row for the output and each layer. Columns: place, rate (λ per token), decay_length (tokens), r2,
        fit_from, fit_to (distances); recent (the share of the last tokens); context_50, context_90, context_95 (tokens,
        medians over texts, infinite if not reached, missing if the fit is poor) and not_reached_50, … (texts); error
        (the median relative standard error of a norm); the 95 % intervals of rate, decay_length and recent in columns
        ending in _low and _high."""
        rows = []
        for reach in self.reaches:
            decay, known = reach.decay, reach.error[~np.isnan(reach.error)]
            row = {"place": reach.place, **with_intervals(rate=decay.rate, decay_length=decay.length)}
            row |= {"r2": decay.r2, "fit_from": decay.first, "fit_to": decay.last}
            row |= with_intervals(recent=reach.recent(self.recent))
            row |= {f"context_{100 * share:.0f}": reach.effective_context(share) for share in SHARES}
            row |= {f"not_reached_{100 * share:.0f}": reach.not_reached(share) for share in SHARES}
            rows.append({**row, "error": float(np.median(known)) if len(known) else math.nan})
        return pd.DataFrame(rows)

    def distances(self, place: str | int = "output") -> pd.DataFrame:
        """Return a row per distance t − s of the output or of a layer: columns distance, pairs, log_norm, norm, share,
        within (the share of the last 1 + distance tokens), each with _low and _high, the quantiles q05 … q95 of the
        norm, the relative error of one norm, and noisy, the share of norms below the float noise."""
        reach = self._reach(place)
        columns: dict[str, Any] = {"distance": np.arange(len(reach.pairs)), "pairs": reach.pairs}
        for name in ("log_norm", "norm", "share", "within"):
            values = getattr(reach, name)
            columns |= {name + end: values[:, at] for at, end in enumerate(("", "_low", "_high"))}
        columns |= {f"q{round(100 * q):02d}": reach.quantiles[:, at] for at, q in enumerate(QUANTILES)}
        return pd.DataFrame({**columns, "error": reach.error, "noisy": reach.noisy})

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        recent, name = self.output.recent(self.recent), named("influence.recent", f"last {self.recent}")
        apart = "" if self.provenance["options"]["length"] is None else "random tokens"
        yield ScoreMaker(self, models)(name, recent, "", count=len(self.lengths), apart=apart)

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import curve

        return curve("share of the influence held by distance", self.output.within[:, 0])

    def to_frame(self) -> pd.DataFrame:
        """Return everything as a row per number: columns part, place, distance, measure, value, low, high, count. First
        the parts "decay" (rate, decay_length, intercept, r2), "context" (the median of the effective context for each
        share, low and high being the quartiles over texts, count the texts that reach it), "recency" (the share of the
        last tokens) and "stream" and "mixer" (cosine, centred, spread); then "distance": log_norm, norm, share, within,
        with the number of (text, t) as count."""
        rows = [row for reach in self.reaches for row in _decay_rows(reach, self.recent)]
        similarity, texts = self.similarity, len(self.lengths)
        for part, values in (("stream", similarity.stream), ("mixer", similarity.mixer)):
            places = similarity.places if part == "stream" else similarity.places[1:-1]
            for (place, measure), ends in zip(product(places, MEASURES), values.reshape(-1, 3).tolist()):
                rows.append((part, place, None, measure, *ends, texts))
        for reach in self.reaches:
            for measure in ("log_norm", "norm", "share", "within"):
                for distance, (value, low, high) in enumerate(getattr(reach, measure).tolist()):
                    count = texts if measure == "within" else int(reach.pairs[distance])
                    rows.append(("distance", reach.place, distance, measure, value, low, high, count))
        names = ["part", "place", "distance", "measure", "value", "low", "high", "count"]
        return pd.DataFrame(rows, columns=names).astype({"distance": "Int64", "count": "Int64"})

    def blocks(self) -> Iterable[Block]:
        yield from self.opening(*sentences(self), notes=self.notes)
        yield self._table()
        yield folded_away("All numbers", lambda: frame_table(self.to_frame(), limit=TABLE_ROWS))

    def _table(self) -> Table:
        reaches, own = {reach.place: reach for reach in self.reaches}, self.of_own_tokens
        lines = []
        for place in self.similarity.places:
            held = {share: f"{100 * share:.0f} %" for share in SHARES}
            names = ("decay length", "R²", f"last {self.recent}", *held.values())
            cells: dict[str, Cell] = dict.fromkeys(names, Cell())
            if (reach := reaches.get(place)) is not None:
                cells |= {"decay length": short_cell(reach.decay.length.value), "R²": _three_decimals(reach.decay.r2)}
                cells[f"last {self.recent}"] = _three_decimals(reach.recent(self.recent).value)
                for share, name in held.items():
                    context = reach.effective_context(share, within=own)
                    cells[name] = short_cell(np.rint(context), ">" if math.isinf(context) else "")
            cells |= {name: _three_decimals(self.similarity.estimate(place, name).value) for name in MEASURES}
            if place.isdigit():
                cells["mixer's cosine"] = _three_decimals(self.similarity.estimate(place, part="mixer").value)
            lines.append(Line((f"layer {place}" if place.isdigit() else place,), cells))
        contexts = [reach.effective_context(share, within=own) for reach in self.reaches for share in SHARES]
        note = f"{', '.join(held.values())}: how many of the last {self.unit} hold that share of the influence"
        note += f" of {self.one}'s own {self.unit}." if own else "."
        if any(map(math.isinf, contexts)):
            note += f" > not reached: at least half of the {self.noun} are too short for that share."
        return table(("place",), lines, note=note)

    def _reach(self, place: str | int) -> Reach:
        known = {reach.place: reach for reach in self.reaches}
        if str(place) not in known:
            hint = did_you_mean(str(place), known) + "; layers are measured with at='layers'" * (not self.layers)
            raise InputError(f"there is no {place!r}; allowed are {', '.join(known)}{hint}")
        return known[str(place)]


def _three_decimals(value: float) -> Cell:
    return Cell(Estimate(value, math.nan, math.nan))


def decay_in_words(reach: Reach) -> str:
    length = reach.decay.length.value
    found = "no decay with distance" if math.isinf(length) else f"decay length {length:.3g}"
    return found if reach.decay.defined else "no decay fitted"


def _decay_rows(reach: Reach, recent: int) -> Iterable[tuple[Any, ...]]:
    decay, texts = reach.decay, len(reach.context)
    found: dict[str, Estimate] = {"rate": decay.rate, "decay_length": decay.length}
    values = {"intercept": decay.intercept, "r2": decay.r2, "fit_from": decay.first, "fit_to": decay.last}
    found |= {name: Estimate(float(value), math.nan, math.nan) for name, value in values.items()}
    yield from (("decay", reach.place, None, name, e.value, e.low, e.high, texts) for name, e in found.items())
    for share in SHARES:
        middle, low, high = (reach.effective_context(share, quantile) for quantile in (0.5, 0.25, 0.75))
        reached = int((~np.isnan(reach.context[:, 0])).sum()) - reach.not_reached(share)
        yield "context", reach.place, None, f"{100 * share:.0f} %", middle, low, high, reached
    last = reach.recent(recent)
    yield "recency", reach.place, None, f"last {recent}", last.value, last.low, last.high, texts


def sentences(result: Influence) -> Iterable[str]:
    reach, unit, texts = result.output, result.unit, len(result.lengths)
    y = "the head's input" if result.of == "hidden" else "the logits"
    where = {"last": "the last position", "all": "every position", "chosen": "chosen positions"}[result.positions]
    yield f"‖∂y/∂x‖ of y, {y} at {where}, by the embeddings x of {result.counted}; {norms_in_words(result)}."

    decay = reach.decay
    if not decay.defined:
        yield "Decay: too few distances for a line."
    elif math.isinf(decay.length.value):
        yield f"Decay: none with distance, λ = {number(decay.rate.value)}{brackets(decay.rate)} (R² {decay.r2:.2f})."
    else:
        yield (
            f"Decay: by a factor of e every {number(decay.length.value)} {unit}{brackets(decay.length)}, "
            f"λ = {number(decay.rate.value)}{brackets(decay.rate)}, over distances {decay.first} to {decay.last} "
            f"(R² {decay.r2:.2f})." + " The exponential fit is poor." * (not decay.straight)
        )
    recent = reach.recent(result.recent)
    ends = brackets(recent.times(100), 1)
    yield f"Recency: the last {result.recent} {unit} hold {100 * recent.value:.1f} %{ends} of the influence."
    if reach.of_own_tokens:
        unknown = f"the influence of {unit} before {result.one} is unknown"
        yield f"Effective context: not defined, because the influence does not fall at one rate, so that {unknown}."
    else:
        parts = []
        for share in SHARES:
            middle, missed = reach.effective_context(share), reach.not_reached(share)
            found = "not reached" if math.isinf(middle) else f"within {tokens_or_dash(middle)}"
            some = f" (not reached in {missed} of {texts})" if missed and math.isfinite(middle) else ""
            parts.append(f"{100 * share:.0f} % {found}{some}")
        yield f"Effective context in {unit}, median: {'; '.join(parts)}."
    if result.of_own_tokens or any(reach.not_reached(share) for share in SHARES):
        contexts = {share: tokens_or_dash(reach.effective_context(share, within=True)) for share in SHARES}
        held = ", ".join(f"{100 * share:.0f} % in {context}" for share, context in contexts.items())
        yield f"Of the influence of {result.one}'s own {unit} alone, the last ones hold {held}."
    similarity = result.similarity
    cosines = similarity.estimate("embeddings"), similarity.estimate("output"), similarity.estimate("output", "centred")
    first, last, centred = (f"{number(found.value, 3)}{brackets(found, 3)}" for found in cosines)
    yield (
        f"Similarity: the mean cosine of {result.one}'s {unit} is {first} at the embeddings and {last} at the output "
        f"({centred} when centred)."
    )


def norms_in_words(result: Influence) -> str:
    """Return "exact", or the number of random vectors with the standard error of a norm."""
    reach = result.output
    if reach.exact:
        return "exact"
    known = reach.error[~np.isnan(reach.error)]
    error = f", a norm's standard error is {100 * float(np.median(known)):.0f} %" if len(known) else ""
    return f"estimated with {result.provenance['options']['probes']} random vectors{error}"


def tokens_or_dash(tokens: float) -> str:
    """Return an effective context in words; "–" if not defined."""
    return "–" if math.isnan(tokens) else "not reached" if math.isinf(tokens) else f"{tokens:,.0f}"
