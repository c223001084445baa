"""Effects of edges on pairs, exact and by gradients, and the faithfulness of circuits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from ssmscope.core.progress import progress_bar
from ssmscope.core.roads import EMBEDDING, LOGITS, Edge, RoadRun, Roads, replacing
from ssmscope.core.ties import difference
from ssmscope.core.weights import weights_constant
from ssmscope.interp.objective import tokens_that_fit
from ssmscope.interp.pairs import EncodedPairs
from ssmscope.interp.partial_runs import PlainRun, can_start_at_layer


class PairRuns:
    """Runs of pairs in which some edges read the corrupted run; `clean` and `corrupted` (pairs,) are the differences of
    logits of the plain runs."""

    def __init__(self, pairs: EncodedPairs, *, taps: bool = False, heads: bool = False) -> None:
        self.pairs, model = pairs, pairs.model
        self.roads = Roads(model, pairs.clean.rows([0]), taps=taps, heads=heads)
        self.edges = self.roads.edges()
        # Every part's output of both runs is held.
        self.batches = [*pairs.batches(max(1, tokens_that_fit(model, gradients=True) // 2))]
        self.clean, self.corrupted = pairs.plain(pairs.clean), pairs.plain(pairs.corrupted)

    def _pair(self, rows: Sequence[int]) -> tuple[RoadRun, RoadRun]:
        return self.roads.run(self.pairs.clean.rows(rows)), self.roads.run(self.pairs.corrupted.rows(rows))

    def without(self, edges: Sequence[Edge]) -> np.ndarray:
        """Return the differences of logits (pairs,) of clean runs in which these edges read the corrupted run."""
        found = np.empty(len(self.pairs))
        with torch.no_grad():
            for rows in self.batches:
                others = self.roads.run(self.pairs.corrupted.rows(rows)).outputs
                run = self.roads.run(self.pairs.clean.rows(rows), replacing(others, edges))
                found[rows] = self.pairs.measure(run.logits, rows).cpu().numpy()
        return found

    def exact(self) -> np.ndarray:
        """Return the change of the difference of logits with one edge corrupted, (pairs, edges). Each run begins with
        the block that reads the edge, where the model's blocks can be run from the residual stream alone."""
        found = np.empty((len(self.pairs), len(self.edges)))
        model, clean = self.pairs.model, self.pairs.clean
        reuse = can_start_at_layer(model, clean.rows([0]))
        with torch.no_grad(), progress_bar() as bar:
            task = bar.add_task("exact edges", total=len(self.batches) * len(self.edges))
            for rows in self.batches:
                base, other = self._pair(rows)
                plain = PlainRun(model, clean.rows(rows), reuse=reuse, last_only=True)
                for number, edge in enumerate(self.edges):
                    change = {edge.sender: other.outputs[edge.sender] - base.outputs[edge.sender]}
                    with self.roads.reading(lambda *to: change if to[:2] == edge[1:] else {}):  # noqa: B023
                        logits = plain.again(first=self.roads.block_of[edge.receiver])
                    change_of = self.pairs.measure(logits, rows) - self.pairs.measure(plain.logits, rows)
                    found[rows, number] = change_of.cpu().numpy()
                    bar.advance(task)
        return found

    def by_gradient(self, steps: int = 0) -> np.ndarray:
        """Return (other − base output) · ∂m/∂(what the road reads of it), (pairs, edges), m the difference of logits
        (edge attribution patching, Syed et al. 2023, Eq. 2, here by road). With `steps` the gradient is the mean of
        those at so many embeddings between the clean and the corrupted one (EAP-IG, Hanna et al. 2024)."""
        found = np.zeros((len(self.pairs), len(self.edges)))
        with progress_bar() as bar:
            for rows in bar.track(self.batches, description="gradients"):
                with torch.no_grad():
                    base, other = self._pair(rows)
                    change = {name: other.outputs[name] - base.outputs[name] for name in self.roads.names}
                for step in range(max(1, steps)):
                    share = (step + 0.5) / steps if steps else 0.0
                    start = base.outputs[EMBEDDING] + share * change[EMBEDDING]
                    found[rows] += self._gradients(rows, change, start) / max(1, steps)
        return found

    def _gradients(self, rows: Sequence[int], change: Mapping[str, Tensor], start: Tensor) -> np.ndarray:
        """Return the sums over positions and channels, (rows, edges), for the gradient from this embedding."""
        leaves: dict[tuple[str, str, str], Tensor] = {}

        def leaf(receiver: str, road: str, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            # All summands of a block's input have one gradient, and each earlier part of the block its own.
            names = (EMBEDDING,) if receiver == LOGITS else (EMBEDDING, *self.roads.in_block(receiver))
            for name in names:
                leaves[receiver, road, name] = torch.zeros_like(start, requires_grad=True)
            return {name: leaves[receiver, road, name] for name in names}

        with torch.enable_grad(), weights_constant(self.pairs.model.module):
            logits = self.roads.run(self.pairs.clean.rows(rows), leaf, start.detach()).logits
            metric = self.pairs.measure(logits, rows).sum()
            asked = [*leaves.values()]
            gradients = dict(zip(leaves, torch.autograd.grad(metric, asked, allow_unused=True)))
        found = np.zeros((len(rows), len(self.edges)))
        for number, edge in enumerate(self.edges):
            own = (edge.receiver, edge.road, edge.sender)
            gradient = gradients[own if own in gradients else (edge.receiver, edge.road, EMBEDDING)]
            if gradient is not None:
                found[:, number] = (change[edge.sender] * gradient).flatten(1).double().sum(1).cpu().numpy()
        return found


def chosen_greedily(runs: PairRuns, order: Sequence[int], until: float) -> tuple[np.ndarray, list[tuple[int, float]]]:
    """Add edges in this order until the circuit's faithfulness reaches `until`; return a mask of them, and the
    faithfulness by the number of edges."""
    curve: list[tuple[int, float]] = []
    step = max(1, len(order) // 100)
    for count in (*range(0, len(order), step), len(order)):
        kept = np.zeros(len(order), dtype=bool)
        kept[list(order[:count])] = True
        curve.append((count, float(faithful(runs, kept).mean() / (runs.clean - runs.corrupted).mean())))
        if curve[-1][1] >= until:
            break
    return kept, curve


def faithful(runs: PairRuns, kept: np.ndarray) -> np.ndarray:
    """Return m(circuit) − m(corrupted), (pairs,): in the circuit's run all other edges read the corrupted run."""
    return difference(runs.without([edge for edge, own in zip(runs.edges, kept) if not own]), runs.corrupted)
