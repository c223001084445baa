"""Mean grid of patched runs over pairs, by site, layer and position class, and its views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.ties import descending
from ssmscope.render.blocks import Block
from ssmscope.render.numbers import counted, number
from ssmscope.render.table import Cell, Line, Table, table

NAMED_CELLS = 12


@dataclass(frozen=True)
class PairPatching(Result, kind="patch-pairs"):
    """Share of the way to the other run that a patched cell goes, mean over pairs."""

    pairs: int
    direction: str
    sites: tuple[str, ...]
    layers: tuple[int, ...]
    """Site and layer of each row; attention and feed-forward parts are counted by themselves."""
    classes: tuple[str, ...]
    base: float
    other: float
    """Mean difference of logits of the run that is patched, and of the one that the patches are from."""
    values: np.ndarray
    """(rows, classes, 3): mean change of the difference of logits, relative to that between both runs, and its
    interval; NaN where nothing is patched."""

    drawn_by = "pair_figure"

    @property
    def headline(self) -> str:
        (row, column), found = self.strongest(1)[0]
        return (
            f"Patching of {counted(self.pairs, 'pair')} on {self.model_name}: most in {self.name(row, column)}: {found}"
        )

    def strongest(self, count: int) -> list[tuple[tuple[int, int], Estimate]]:
        """Return the cells that change the most."""
        sizes = np.nan_to_num(np.abs(self.values[..., 0]), nan=-1.0)
        order = descending(sizes.ravel())[:count]
        places = [(int(row), int(column)) for row, column in zip(*np.unravel_index(order, sizes.shape))]
        return [(place, Estimate(*map(float, self.values[place]))) for place in places if sizes[place] >= 0]

    def name(self, row: int, column: int) -> str:
        """Name a cell."""
        return f"{self.sites[row]} of layer {self.layers[row]} at {self.classes[column]}"

    def to_frame(self) -> pd.DataFrame:
        """Return a row per cell that is patched."""
        rows = [
            (self.sites[row], self.layers[row], self.classes[column], *map(float, self.values[row, column]))
            for row, column in np.ndindex(self.values.shape[:2])
            if np.isfinite(self.values[row, column, 0])
        ]
        return pd.DataFrame(rows, columns=["site", "layer", "position", "share", "share_low", "share_high"])

    @classmethod
    def compare(cls, results: Sequence[PairPatching], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            place, found = result.strongest(1)[0]
            lines.append(Line((label,), {"most in": Cell(text=result.name(*place)), "share": Cell(found)}))
        return table(("model",), lines)

    def blocks(self) -> Iterable[Block]:
        names = ("corrupted", "clean") if self.direction == "denoise" else ("clean", "corrupted")
        ends = "; ".join(f"{name}: {number(end)}" for name, end in zip(names, (self.base, self.other)))
        yield from self.opening(f"Mean difference of logits, {ends}.")
        lines = []
        for (row, column), found in self.strongest(NAMED_CELLS):
            lines.append(Line((self.sites[row], str(self.layers[row]), self.classes[column]), {"share": Cell(found)}))
        into = f"Share of the way to the {names[1]} run when its values are put into the {names[0]} one."
        yield table(("site", "layer", "position"), lines, note=into)
