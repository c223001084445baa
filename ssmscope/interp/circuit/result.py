"""Scored edges and the circuit chosen of them, and their views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.roads import Edge
from ssmscope.core.ties import descending
from ssmscope.render.blocks import Block
from ssmscope.render.numbers import counted, number
from ssmscope.render.table import Cell, Line, Table, table

NAMED_EDGES = 20
SINGLE = "single entrance"
"""Name of the road into a part with one entrance, such as the logits."""


@dataclass(frozen=True)
class Circuit(Result, kind="circuit"):
    """Edges between a model's parts by road, with their share of the answer, and those of the circuit."""

    pairs: int
    method: str
    nodes: tuple[str, ...]
    """In the order of their runs."""
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    roads: tuple[str, ...]
    """One per edge; "" for parts that have one entrance."""
    scores: np.ndarray
    """(edges, 3): the mean change of the difference of logits, as a share of it, and its interval; −1 where the answer
    becomes the corrupted run's."""
    kept: np.ndarray
    """(edges,) bool: the circuit."""
    faithfulness: np.ndarray
    """(3,): of the circuit, with its interval."""
    random: np.ndarray
    """(circuits,): of random circuits of as many edges."""
    curve: np.ndarray
    """(steps, 2): number of edges and faithfulness where edges were added one after the other; else no step."""
    clean: float
    corrupted: float
    """Mean difference of logits of the plain runs."""

    @property
    def edges(self) -> tuple[Edge, ...]:
        return tuple(map(Edge, self.senders, self.receivers, self.roads))

    @property
    def circuit(self) -> tuple[Edge, ...]:
        """Edges of the circuit, the strongest first."""
        edges = self.edges
        return tuple(edges[at] for at in self.order() if self.kept[at])

    def order(self) -> list[int]:
        """Return the numbers of the edges, the strongest first."""
        return descending(np.abs(self.scores[:, 0])).tolist()

    @property
    def headline(self) -> str:
        said, edges = f"Circuit of {self.model_name}:", counted(len(self.kept), "edge")
        if not self.kept.any():
            return f"{said} none of {edges} carries as much as the threshold"
        keep = "keeps" if self.kept.sum() == 1 else "keep"
        random = f" (random circuits {number(float(self.random.mean()), 3)})" if len(self.random) else ""
        said += f" {int(self.kept.sum())} of {edges} {keep} {Estimate(*self.faithfulness)} of the answer"
        return f"{said}{random}; most is carried by {self.circuit[0].name}"

    def to_frame(self) -> pd.DataFrame:
        """Return a row per edge, in the order of the model's runs."""
        columns: dict[str, object] = {"sender": self.senders, "receiver": self.receivers, "road": self.roads}
        scores = {f"score{end}": self.scores[:, at] for at, end in enumerate(("", "_low", "_high"))}
        return pd.DataFrame({**columns, **scores, "circuit": self.kept})

    @classmethod
    def compare(cls, results: Sequence[Circuit], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            cells = {"edges": Cell(text=f"{int(result.kept.sum())} of {len(result.kept)}")}
            cells["faithfulness"] = Cell(Estimate(*map(float, result.faithfulness)))
            lines.append(Line((label,), cells))
        return table(("model",), lines)

    def blocks(self) -> Iterable[Block]:
        ends = f"difference of logits {number(self.clean)} in the clean runs, {number(self.corrupted)} in the corrupted"
        random = "" if not len(self.random) else (
            f" {counted(len(self.random), 'random circuit')} of as many edges: {number(float(self.random.mean()), 3)}, "
            f"at most {number(float(self.random.max()), 3)}."
        )  # fmt: skip
        kept = f"Faithfulness of the circuit {Estimate(*map(float, self.faithfulness))}.{random}"
        yield from self.opening(f"{counted(self.pairs, 'pair')}; {ends}.", kept)
        lines = []
        for at in self.order()[:NAMED_EDGES]:
            edge, ends_of = self.edges[at], Estimate(*map(float, self.scores[at]))
            cells = {"change": Cell(ends_of), "circuit": Cell(text="yes" if self.kept[at] else "")}
            lines.append(Line((edge.sender, edge.receiver, edge.road or SINGLE), cells))
        how = {"exact": "", "gradient": ", approximated by a gradient", "integrated": ", by integrated gradients"}
        note = "Change of the difference of logits, as a share of it, with the edge read from the corrupted run"
        note += f"{how[self.method]}."
        yield table(("from", "to", "road"), lines, note=note)
