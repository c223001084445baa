"""Result of stability: half-lives, growth and norms of the states of every layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from ssmscope.api.results import Result
from ssmscope.api.scores import Score, ScoreMaker
from ssmscope.core.bootstrap import Estimate, with_intervals
from ssmscope.core.ties import descending
from ssmscope.outline import Outlined
from ssmscope.render.blocks import Block
from ssmscope.render.numbers import percent_of, token_count
from ssmscope.render.table import Cell, Line, Table, number_cell, short_cell, table

BEHAVIOURS = ("stable", "marginal", "unstable")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of the half-lives of a layer's states."""


@dataclass(frozen=True)
class LayerStability(Outlined):
    """Stability of one memory of a layer; most layers have one."""

    layer: int
    part: int
    """Index among the layer's memories."""
    parts: int
    """Number of the layer's memories."""
    states: int
    """Number of decays of a head, each with its half-life: the number of states, or 1 if all states share a decay."""
    behaviour: str
    why: str
    """The reason in words, with its number."""
    abscissa: np.ndarray | None
    """(heads,) spectral abscissae; None without a continuous A."""
    largest: np.ndarray
    """(heads,) the largest log-gain of a step on the inputs; −∞ if a head makes no step."""
    possible: np.ndarray | None
    """(heads,) the largest log-gain of a step over all inputs; None if no bound is known."""
    bounded_by: str
    mean: np.ndarray
    """(heads,) the mean log-gain of each head's slowest state."""
    half_life: np.ndarray
    """(heads,) the median half-life of each head's states, in tokens."""
    quantiles: tuple[float, ...]
    """The `QUANTILES` of the half-lives of all heads and states, not interpolated."""
    never: int
    """Number of the heads × states whose half-life exceeds the longest text."""
    growth: Estimate

    @property
    def heads(self) -> int:
        return len(self.largest)

    @property
    def name(self) -> str:
        """Layer number, "3", or "3.1" for the second of several recurrences."""
        return str(self.layer) if self.parts == 1 else f"{self.layer}.{self.part}"

    @property
    def outlasting(self) -> str:
        """Share of its states that outlast the longest text, in percent."""
        return percent_of(self.never, self.heads * self.states)

    @property
    def spectral_abscissa(self) -> float:
        """s_A, the largest of all heads; NaN without a continuous A."""
        return math.nan if self.abscissa is None else float(self.abscissa.max())

    @property
    def largest_gain(self) -> float:
        """The largest log-gain of a step on the inputs."""
        return float(self.largest.max())

    @property
    def possible_gain(self) -> float:
        """The largest log-gain of a step over all inputs; NaN if no bound is known."""
        return math.nan if self.possible is None else float(self.possible.max())


@dataclass(frozen=True)
class Stability(Result, kind="stability"):
    """Stability of every layer and of the model. `len`, iteration and `[i]` are over `layers`."""

    inputs: str
    given: bool
    """True for the user's texts, False for random tokens."""
    texts: int
    longest: int
    behaviour: str
    layers: tuple[LayerStability, ...]
    positions: np.ndarray
    """(positions,) positions of the norms, from 0."""
    norms: np.ndarray
    """(layers, positions, 3) mean norm over texts and the ends of its interval (NaN with one text)."""
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> LayerStability:
        return self.layers[index]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Layer numbers, in the order of `norms`; a layer may have several recurrences."""
        return tuple(dict.fromkeys(one.layer for one in self.layers))

    def last_norm(self, layer: int) -> float:
        return float(self.norms[self.numbers.index(layer), -1, 0])

    def counts(self) -> dict[str, int]:
        return {name: sum(layer.behaviour == name for layer in self.layers) for name in BEHAVIOURS}

    def verdict(self, at: int = 0) -> str:
        found = listed(self.counts())
        if "," in found:
            return f"{self.behaviour}: {found} of {len(self)} {self.unit}"
        return f"{self.behaviour} in {self._every if len(self) > 1 else 'its one layer'}"

    @classmethod
    def compare(cls, results: Sequence[Stability], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            frame = result.to_frame()
            cells = {"behaviour": Cell(text=result.behaviour), result.unit: Cell(text=listed(result.counts()))}
            for column in ("spectral_abscissa", "largest_gain", "possible_gain", "growth"):
                cells[f"largest {column.removeprefix('largest_').replace('_', ' ')}"] = number_cell(frame[column].max())
            lines.append(Line((label,), cells))
        note = "Gains and growth are natural logarithms per token, the spectral abscissa is per unit of Δ."
        return table(("model",), lines, note=note)

    @property
    def headline(self) -> str:
        model = self.model_name
        same = self.counts()[self.behaviour]
        if len(self.layers) == 1:
            return f"Stability of {model}: {self.behaviour}"
        where = self._every if same == len(self.layers) else f"{same} of {len(self.layers)} {self.unit}"
        return f"Stability of {model}: {self.behaviour} in {where}"

    @property
    def _every(self) -> str:
        """All layers in words: "all 4 layers", "both layers"."""
        return f"{'both' if len(self) == 2 else f'all {len(self)}'} {self.unit}"

    @property
    def unit(self) -> str:
        """Noun for `layers`: "layers", or "recurrences" if some layer has several."""
        return "recurrences" if any(layer.parts > 1 for layer in self.layers) else "layers"

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        """Yield the largest growth. Neither side is better: what forgets faster is more stable, and remembers less."""
        worst = self.layers[descending(np.array([layer.growth.value for layer in self.layers]))[0]]
        apart = "" if self.given else "random tokens"
        make = ScoreMaker(self, models)
        yield make("stability.growth", worst.growth, "", "nats per token", count=self.texts, apart=apart)

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import curve

        return curve("norm of the states by position", self.norms[-1, :, 0])

    def to_frame(self) -> pd.DataFrame:
        """Return a row per layer, or per recurrence of it. Columns: layer, part (index among the layer's recurrences),
        heads, states (decays per head), behaviour, spectral_abscissa (per unit of Δ), largest_gain (of a step on the
        inputs), possible_gain (over all inputs), growth with its 95 % interval, all natural logarithms per token;
        half_life_5 … half_life_95 in tokens; never (states with a half-life longer than the longest text) and
        never_share; last_norm, at the last position."""
        rows = []
        names = ("layer", "part", "heads", "states", "behaviour", "spectral_abscissa", "largest_gain", "possible_gain")
        for one in self.layers:
            row = {name: getattr(one, name) for name in names} | with_intervals(growth=one.growth)
            row |= {f"half_life_{round(100 * q)}": value for q, value in zip(QUANTILES, one.quantiles)}
            share = one.never / (one.heads * one.states)
            rows.append({**row, "never": one.never, "never_share": share, "last_norm": self.last_norm(one.layer)})
        return pd.DataFrame(rows)

    def heads(self) -> pd.DataFrame:
        """Return a row per head: columns layer, part, head, spectral_abscissa, largest_gain, possible_gain, mean_gain
        (of its slowest state) and half_life (the median of its states), as in `to_frame`."""
        parts = []
        for one in self.layers:
            columns: dict[str, Any] = {"layer": one.layer, "part": one.part, "head": range(one.heads)}
            columns["spectral_abscissa"] = math.nan if one.abscissa is None else one.abscissa
            columns["largest_gain"] = one.largest
            columns["possible_gain"] = math.nan if one.possible is None else one.possible
            parts.append(pd.DataFrame({**columns, "mean_gain": one.mean, "half_life": one.half_life}))
        return pd.concat(parts, ignore_index=True)

    def blocks(self) -> Iterable[Block]:
        yield from self.opening(f"On {self.inputs}. {self.in_words()}", notes=self.notes)
        yield self._gains()
        yield self._memory()

    def in_words(self) -> str:
        worst = next(layer for layer in self.layers if layer.behaviour == self.behaviour)
        found, unit = listed(self.counts()), self.unit.removesuffix("s")
        if "," not in found:
            where = f" in {self._every}" if len(self.layers) > 1 else ""
            of = f"in {unit} {worst.name}, " * (len({layer.why for layer in self.layers}) > 1)
            return f"The model is {self.behaviour}{where}: {of}{worst.why}."
        one = f"The {self.behaviour} {unit}"
        some = one if self.counts()[self.behaviour] == 1 else f"Of the {self.behaviour} {self.unit}"
        return f"The model is {self.behaviour} ({found}). {some}, {worst.name}: {worst.why}."

    def _gains(self) -> Table:
        continuous = any(layer.abscissa is not None for layer in self.layers)
        lines = []
        for one in self.layers:
            cells = {"behaviour": Cell(text=one.behaviour)}
            if continuous:
                cells["s_A"] = number_cell(one.spectral_abscissa)
            cells |= {"growth": Cell(one.growth, digits=None), "step": number_cell(one.largest_gain)}
            lines.append(Line((one.name,), {**cells, "any step": number_cell(one.possible_gain)}))
        bounds = "; ".join(dict.fromkeys(layer.bounded_by for layer in self.layers))
        note = (
            "Natural logarithms: growth, the mean gain of a step of the layer's slowest state; step, the largest gain "
            f"of a step on these inputs; any step, over all inputs ({bounds})."
        )
        if continuous:
            note += " s_A, the spectral abscissa, is the largest entry of the continuous A."
        if self.unit == "recurrences":
            note += " A layer's several recurrences are numbered after the dot."
        return table(("layer",), lines, note=note)

    def _half_life(self, found: float) -> str:
        """Format a half-life, of which none beyond the longest text was seen."""
        return token_count(found) if found <= self.longest else f"> {self.longest:,}"

    def _memory(self) -> Table:
        lines = []
        for one in self.layers:
            q5, q25, q50, q75, q95 = map(self._half_life, one.quantiles)
            median = one.quantiles[2]
            cells = {
                "heads": short_cell(one.heads),
                "states": short_cell(one.states),
                "half-life": short_cell(median, q50),
            }
            cells |= {
                "25 % to 75 %": short_cell(median, q25 if q25[0] == ">" else f"{q25} to {q75}"),
                "5 % to 95 %": short_cell(median, q5 if q5[0] == ">" else f"{q5} to {q95}"),
            }
            cells["never"] = short_cell(one.never, one.outlasting)
            lines.append(Line((one.name,), {**cells, "norm": number_cell(self.last_norm(one.layer))}))
        note = (
            "states: decays per head. Half-life: tokens until half of a state has decayed, the median of the layer's "
            f"states. never: states that keep half beyond the longest text ({self.longest:,} tokens). norm: of all the "
            "layer's states at the last token."
        )
        return table(("layer",), lines, note=note)


def listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items() if number)
