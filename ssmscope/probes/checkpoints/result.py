"""Result of comparing checkpoints: measures of each, and tables."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from ssmscope.api.results import TABLE_ROWS, Result
from ssmscope.probes.bound.result import NORM_MEANINGS
from ssmscope.probes.bound.terms import Norms
from ssmscope.probes.stability.result import BEHAVIOURS
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.html import folded_away
from ssmscope.render.numbers import counted, number
from ssmscope.render.table import Cell, Line, Table, frame_table, short_cell, table
from ssmscope.render.tokens import shorten, visible

NORMS = ("p", *NORM_MEANINGS)
"""Columns of the norms of a model that the theorem covers."""


@dataclass(frozen=True)
class Checkpoint:
    """Measures of one checkpoint; NaN where it has none."""

    name: str
    reason: str
    """Why it could not be read; empty if it could."""
    architecture: str = ""
    fingerprint: str = ""
    behaviour: str = ""
    """One of `BEHAVIOURS`; empty if it could not be read."""
    abscissa: float = math.nan
    """s_A, the largest of all layers, as are the next three (see `to_frame`)."""
    largest_gain: float = math.nan
    possible_gain: float = math.nan
    """ln ρ of the bound for a selective SSM."""
    growth: float = math.nan
    norms: Norms | None = None
    length: int | None = None
    log_capacity: float = math.nan
    log_capacity_printed: float = math.nan
    bound: float = math.nan
    vacuous: bool | None = None


@dataclass(frozen=True)
class StabilityTable(Result, kind="stability-table"):
    """Table of checkpoints. `len`, iteration and `[i]` are over its rows."""

    rows: tuple[Checkpoint, ...]
    lengths: np.ndarray
    """(lengths,) T of the curves."""
    curves: np.ndarray
    """(checkpoints, lengths) ln C with all constants; NaN without one."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Checkpoint:
        return self.rows[index]

    @property
    def names(self) -> list[str]:
        """Names of the checkpoints without their common folder."""
        names = [row.name for row in self.rows]
        folder = os.path.commonpath(names) if len({os.path.isabs(name) for name in names}) == 1 else ""
        if len(set(names)) == 1:
            return [os.path.basename(name) for name in names]
        return [os.path.relpath(name, folder) if folder else name for name in names]

    @property
    def read(self) -> list[Checkpoint]:
        return [row for row in self.rows if not row.reason]

    def verdict(self, at: int = 0) -> str:
        if len(self.provenance["given"]) != len(self.rows):  # A given directory holds several.
            return Result.verdict(self, at)
        row = self.rows[at]
        if row.reason:
            return f"unreadable: {row.reason}"
        bound = "" if row.vacuous is None else ", bound vacuous" if row.vacuous else f", bound {row.bound:.3g}"
        return f"{row.behaviour}, s_A {row.abscissa:.3g}{bound}".replace("-", "−")

    @property
    def headline(self) -> str:
        counts = {name: sum(row.behaviour == name for row in self.rows) for name in BEHAVIOURS}
        counts["unreadable"] = len(self.rows) - len(self.read)
        listed = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        return f"Stability of {self.provenance.get('model', 'checkpoints')}: {listed}"

    def to_frame(self) -> pd.DataFrame:
        """Return a row per checkpoint, in the order given. Columns: model, reason (why it could not be read, else
        empty), architecture, behaviour, spectral_abscissa, log_rho (the largest log-gain of a step over all inputs),
        largest_gain and growth (on random tokens); length, log_capacity (ln C with all constants), log_capacity_printed
        (Eq. 14), bound (Eq. 13; c_l if vacuous) and vacuous; p, states (N), channels (d), the norms B_u to M_A;
        fingerprint. Unknown values are missing."""
        named = {"spectral_abscissa": "abscissa", "log_rho": "possible_gain", "largest_gain": "largest_gain"}
        same = ("growth", "length", "log_capacity", "log_capacity_printed", "bound", "vacuous")
        rows = []
        for row in self.rows:
            columns: dict[str, Any] = {"model": row.name, "reason": row.reason, "architecture": row.architecture}
            columns["behaviour"] = row.behaviour
            columns |= {column: getattr(row, name) for column, name in (*named.items(), *zip(same, same))}
            columns |= {"states": getattr(row.norms, "state", None), "channels": getattr(row.norms, "channels", None)}
            columns |= {name: getattr(row.norms, name, math.nan) for name in NORMS}
            rows.append({**columns, "fingerprint": row.fingerprint})
        types = {"length": "Int64", "vacuous": "boolean", "states": "Int64", "channels": "Int64"}
        return pd.DataFrame(rows).astype(types)

    def curve(self) -> pd.DataFrame:
        """Return a row per checkpoint and length: columns model, length, log_capacity (with all constants)."""
        known = [(row.name, curve.tolist()) for row, curve in zip(self.rows, self.curves) if row.norms is not None]
        found = [(name, int(T), value) for name, curve in known for T, value in zip(self.lengths, curve)]
        return pd.DataFrame(found, columns=["model", "length", "log_capacity"])

    def blocks(self) -> Iterable[Block]:
        yield from self.opening()
        yield replace(self._table(), brief=TABLE_ROWS)
        yield from map(Prose, self._remarks())
        rest = ["model", "architecture", "largest_gain", "states", "channels", *NORMS, "fingerprint"]
        note = "largest_gain: the largest log-gain of a step on random tokens."
        if any(row.norms is not None for row in self.rows):
            note += " p to M_A: the bias of the step and the norms in the bound, as `bound` lists them."
        frame = self.to_frame()[rest].assign(model=self.names)
        numbers = replace(frame_table(frame, heads=["model"], limit=TABLE_ROWS), note=note)
        yield folded_away("Gains, sizes and norms", lambda: numbers)

    def _table(self) -> Table:
        lines = []
        bounded = any(row.length is not None for row in self.rows)
        continuous = not all(math.isnan(row.abscissa) for row in self.rows)
        for name, row in zip(self.names, self.rows):
            cells = {"behaviour": Cell(text=row.behaviour or "unreadable")}
            if continuous:
                cells["s_A"] = short_cell(row.abscissa)
            cells |= {"ln ρ": short_cell(row.possible_gain), "growth": short_cell(row.growth)}
            if bounded:
                cells["T"] = short_cell(math.nan) if row.length is None else short_cell(row.length)
                for column, capacity in (("ln C", row.log_capacity), ("Eq. 14", row.log_capacity_printed)):
                    cells[column] = short_cell(capacity, number(capacity, 2))
                cells["bound"] = short_cell(
                    math.nan if row.vacuous is None else row.bound, "vacuous" if row.vacuous else ""
                )
            lines.append(Line((shorten(visible(name), 34),), cells))
        note = "s_A: the spectral abscissa, the largest entry of the continuous A; " * continuous
        note += (
            "ln ρ: the largest log-gain of a step over all inputs; growth: the mean log-gain of the fastest-growing "
        )
        note += "state, on random tokens"
        if bounded:
            note += "; ln C: the capacity with all constants, and by Eq. 14"
        elif any(row.norms is not None for row in self.rows):
            note += ". The bound requires a length"
        return table(("checkpoint",), lines, note=f"{note}.")

    def _remarks(self) -> Iterable[str]:
        outside = sum(row.norms is None for row in self.read)
        if outside:
            which = "any checkpoint" if outside == len(self.rows) else counted(outside, "checkpoint")
            reason = "the theorem covers one selective SSM between embeddings and head"
            yield f"No capacity C and no bound for {which}: {reason}."
        yield from (f"{name}: {row.reason}" for name, row in zip(self.names, self.rows) if row.reason)
