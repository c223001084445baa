"""Grid of patched runs, from runs that start after what they share, and its approximation by one gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssmscope.core.batching import TOKENS_AT_ONCE
from ssmscope.core.edits import Edit, Place, Site, edited, new_state, recorded, replaced
from ssmscope.core.encoding import Batch
from ssmscope.core.mixers import weights_constant
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerState, States, gathered, mapped, tensors
from ssmscope.errors import InputError
from ssmscope.interp.interventions import answer_ids, check_heads, probability_and_logit
from ssmscope.interp.resuming import JoiningRun, token_windows
from ssmscope.interp.sanity.measure import spearman

MAX_STATE_ENDS = 8
"""Number of tokens after which states are kept at once."""
STREAM_NUMBERS_AT_ONCE = 2**21
"""Numbers of the residual stream that run at once, where that is more than `TOKENS_AT_ONCE` tokens: in narrow models a
call costs more than its tokens."""

PLACES: dict[str, Place] = {"head": "scans", **{name: name for name in ("output", "residual", "convolution")}}
"""Places of the edits that read and patch a site's values."""
Cells = list[tuple[int | None, int]]
"""Layers, None for all together, and positions (or heads)."""


Recorded = dict[tuple[int, int], list[Tensor]]
"""Values of a run, by layer, and by the token after which a state is, or the convolution or recurrence."""


def first_difference(clean: Batch, corrupted: Batch) -> int:
    right, wrong = (batch.input_ids.shape[1] for batch in (clean, corrupted))
    if right != wrong:
        raise InputError(
            f"the clean text has {right} tokens and the corrupted one {wrong}; give texts of as many tokens"
        )
    differ = (clean.input_ids != corrupted.input_ids)[0]
    if not bool(differ.any()):
        raise InputError("the clean and the corrupted text have the same tokens; give two that differ")
    if bool(differ.all()):
        raise InputError("the clean and the corrupted text have no token in common; change only the words that matter")
    return int(differ.nonzero()[0])


def answer_pair(
    model: Model, pair: tuple[Batch, Batch], answer: int | str | None, contrast: int | str | None
) -> tuple[tuple[int, int], tuple[str, str]]:
    (right, *_), (name, *_) = answer_ids(model, pair[0], answer)
    (wrong, *_), (other, *_) = answer_ids(model, pair[1], contrast)
    if right == wrong:
        both = answer is None and contrast is None
        how = f"both texts have the answer {name!r}" if both else f"answer and contrast are both {name!r}"
        raise InputError(f"{how}; name two that differ, answer=… and contrast=…")
    return (right, wrong), (name, other)


class PatchRuns:
    """Runs of one text, `base`, with values of the run of another, `source`."""

    def __init__(self, model: Model, base: Batch, source: Batch) -> None:
        self.model, self.base, self.source = model, base, source
        self.layers, self.length = range(model.num_layers), base.input_ids.shape[1]
        self.joining = JoiningRun(model, base)
        narrow = STREAM_NUMBERS_AT_ONCE // self.joining.width if self.joining.works else 0
        self.at_once = max(TOKENS_AT_ONCE, narrow)
        both = (base, source)
        self.pair = Batch(
            torch.cat([each.input_ids for each in both]),
            torch.cat([each.mask for each in both]),
            tuple(each.tokens[0] for each in both),
            tuple(each.words[0] for each in both),
        )

    def heads(self) -> int:
        kept: dict[Any, Tensor] = {}
        self.model.run(self.base, edits=recorded("scans", kept), last_only=True)
        heads = max(y.shape[2] for y in kept.values())
        check_heads(self.model, heads, "patch another site")
        return heads

    def of_states(self, positions: Sequence[int]) -> Iterator[tuple[Cells, Tensor]]:
        """Yield cells with their logits, the state of a layer patched after a token."""
        layers: list[int | None] = [None, *self.layers]
        for places, states in self._groups(sorted(positions)):
            cells = sorted(((layer, place) for place in places for layer in layers), key=_layer_of)
            rows = [
                torch.tensor([2 * places.index(place) + int(own in (layer, None)) for own, place in cells])
                for layer in self.layers
            ]
            if states is not None:
                begins = [place + 1 for _, place in cells]
                yield cells, self._logits(cells, begins, self._spread(states, rows, cells), [])
            else:
                kept: dict[int, LayerState] = {}
                keep = new_state(places[0], lambda state, site: kept.setdefault(site.layer, state))  # noqa: B023
                self.model.run(self.pair, edits=keep, last_only=True)
                put = new_state(places[0], partial(_put, kept, rows))
                yield cells, self._logits(cells, [0] * len(cells), None, [put])

    def _groups(self, positions: Sequence[int]) -> Iterator[tuple[Sequence[int], States | None]]:
        """Yield positions whose cells run together, with the states after them: for each position the base run's, then
        the source's, of one run whose rows have different ends; one by one and without states for a model that cannot
        continue from them."""
        if not self.model.continues:
            yield from (([place], None) for place in positions)
            return
        before: States | None = None
        at = 0
        for first in range(0, len(positions), MAX_STATE_ENDS):
            chosen = positions[first : first + MAX_STATE_ENDS]
            places = [place for place in chosen for _ in self.pair.tokens]
            batch = token_windows(self.pair, [0, 1] * len(chosen), [at] * len(places), [place + 1 for place in places])
            start = None if before is None else gathered(before, torch.tensor([0, 1] * len(chosen)))
            after = self.model.run(batch, start, last_only=True).states
            before, at = gathered(after, torch.tensor([-2, -1]) + len(places)), chosen[-1] + 1
            done = 0
            while done < len(chosen):
                tokens = (len(self.layers) + 1) * (self.length - chosen[done])
                group = chosen[done : done + (max(1, self.at_once // tokens) if self.joining.works else 1)]
                yield group, gathered(after, torch.arange(2 * done, 2 * (done + len(group))))
                done += len(group)

    def of_values(self, site: str, positions: Sequence[int]) -> Iterator[tuple[Cells, Tensor]]:
        """Yield cells with their logits: a layer's value at `site` patched at a token, or a head's output at all of
        these tokens."""
        heads, place = site == "head", PLACES[site]
        kept: dict[Any, Tensor] = {}
        self.model.run(self.source, edits=recorded(place, kept), last_only=True)
        if not kept:
            raise InputError(f"the layers of {self.model.name} have no {site}; patch another site")
        patched = sorted({key[0] if isinstance(key, tuple) else key for key in kept})
        cells: Cells = [(layer, at) for at in sorted(positions) for layer in (None, *patched)]
        if heads and positions:
            cells = [(layer, head) for layer in patched for head in range(kept[layer, 0].shape[2])]
        for chosen, start, states in self._chunks(cells, [min(positions) if heads else at for _, at in cells]):
            rows = {}
            for layer, count in zip(patched, self._counts(chosen, patched)):
                of_head = (kept[layer, 0].shape[2],) if heads else ()
                rows[layer] = torch.zeros(count, self.length - start, *of_head, dtype=torch.bool)
                for row, (own, at) in enumerate(chosen[:count]):
                    if own in (layer, None):
                        rows[layer][row][([each - start for each in positions], at) if heads else at - start] = True
            values = {key: value[:, start:] for key, value in kept.items()}
            yield chosen, self._logits(chosen, [start] * len(chosen), states, [replaced(place, values, rows=rows)])

    def _chunks(self, cells: Cells, begins: Sequence[int]) -> Iterator[tuple[Cells, int, States | None]]:
        """Yield cells that run together, their first position, and the base run's state there; `begins` is sorted."""
        at, done, states = 0, 0, None
        while done < len(cells):
            start = begins[done] if self.model.continues else 0
            if start > at:
                states = self.model.run(token_windows(self.base, [0], [at], [start]), states, last_only=True).states
                at = start
            count = max(1, self.at_once // (self.length - start))
            chosen = sorted(cells[done : done + count], key=_layer_of)
            rows = [torch.zeros(len(chosen), dtype=torch.long)] * len(self.layers)
            yield chosen, start, None if states is None else self._spread(states, rows, chosen)
            done += count

    def _spread(self, states: States, rows: Sequence[Tensor], cells: Cells) -> States:
        """Return the states of the cells' runs, out of those of each layer; attention keeps the base run's."""
        counts = self._counts(cells)
        own = tuple(gathered((state,), row[:count])[0] for state, row, count in zip(states, rows, counts))
        return own + gathered(states[len(rows) :], torch.zeros(len(cells), dtype=torch.long))

    def _counts(self, cells: Cells, layers: Sequence[int] | None = None) -> list[int]:
        """Return the number of these cells' rows that each layer runs; cells are in the order of their layers."""
        works = self.joining.works
        counts = self.joining.counts([*map(_layer_of, cells)]) if works else [len(cells)] * len(self.layers)
        return counts if layers is None else [counts[layer] for layer in layers]

    def _logits(self, cells: Cells, begins: Sequence[int], states: States | None, edits: Sequence[Edit]) -> Tensor:
        """Return the last logits of runs of the base text from some token on, one for each cell. Rows that begin later
        are padded on the right, where nothing of them is read any more: layers need no mask."""
        batch = token_windows(self.base, [0] * len(cells), begins, [self.length] * len(cells))
        joining = self.joining.rows([*map(_layer_of, cells)], begins) if self.joining.works else nullcontext()
        running = self.model.running(mask=torch.ones_like(batch.mask), states=states)
        with joining, edited(self.model, edits) if edits else nullcontext(), torch.no_grad(), running:
            return self.model.forward(batch, last_only=True)


def _layer_of(cell: tuple[int | None, int]) -> int:
    """Return the layer from which on a cell's run differs from the base run; 0 where all layers are patched."""
    return cell[0] or 0


def _put(kept: Mapping[int, LayerState], rows: Sequence[Tensor], state: LayerState, site: Site) -> LayerState:
    """Return the kept state of a layer for the rows in which it is patched, out of those that run there."""
    return gathered((kept[site.layer],), rows[site.layer][: len(tensors((state,))[0])])[0]


def measure(model: Model, logits: Tensor, ids: tuple[int, int]) -> np.ndarray:
    """Return the answer's probability and the difference of the logits, (rows, 2)."""
    probability, right = probability_and_logit(model, logits, ids[0])
    return torch.stack([probability, right - logits[:, ids[1]].double()], dim=1).cpu().numpy()


def attributed(runs: PatchRuns, site: str, positions: Sequence[int], ids: tuple[int, int]) -> np.ndarray:
    """Return (layers, positions), or (layers, heads): (a_source − a_base) · ∂m/∂a, m the difference of the logits of
    answer and contrast in the base run (attribution patching, Nanda 2023; Syed et al. 2023, Eq. 2)."""
    kept: tuple[Recorded, Recorded] = ({}, {})
    with torch.no_grad():
        _logits(runs.model, runs.source, _edits(site, positions, kept[1]))
    with torch.enable_grad(), weights_constant(runs.model.module):
        logits = _logits(runs.model, runs.base, _edits(site, positions, kept[0]))
        if not kept[0]:
            raise InputError(f"the layers of {runs.model.name} have no {site}; patch another site")
        metric = (logits[:, ids[0]].double() - logits[:, ids[1]].double()).sum()
        points = [point for own in kept[0].values() for point in own]
        gradients: Iterator[Tensor | None] = iter(torch.autograd.grad(metric, points, allow_unused=True))
    layers = runs.model.num_layers
    found = np.zeros((layers, runs.heads() if site == "head" else len(positions)))
    column = {place: number for number, place in enumerate(positions)}
    for (layer, part), own in kept[0].items():
        for point, other in zip(own, kept[1][layer, part]):
            gradient = next(gradients)
            if gradient is None:
                continue
            # Where both are the same infinity, as in empty memories, nothing changes.
            change = torch.where(point == other, 0.0, other.double() - point.detach().double())
            effect = (change * gradient.double())[0].cpu()
            if site == "state":
                found[layer, column[part]] += float(effect.sum())
            elif site == "head":
                heads = effect[list(positions)].sum((0, 2)).numpy()
                found[layer, : len(heads)] += heads
            else:
                found[layer] += effect[list(positions)].flatten(1).sum(1).numpy()
    return found


def agreement(attributed: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """Return Pearson's and Spearman's correlation over the cells of both grids; NaN where one grid is constant."""
    first, second = attributed.ravel(), exact.ravel()
    constant = first.std() == 0 or second.std() == 0
    return (np.nan if constant else float(np.corrcoef(first, second)[0, 1])), spearman(first, second)


def _logits(model: Model, batch: Batch, edits: Sequence[Edit]) -> Tensor:
    with edited(model, edits), model.running(mask=batch.mask):
        return model.forward(batch, last_only=True)


def _edits(site: str, positions: Sequence[int], into: Recorded) -> list[Edit]:
    """Return edits that record a site's values, and continue from them as from leaves of the gradient's graph."""
    if site == "state":
        return [new_state(place, partial(_states, into, place)) for place in positions]
    return [Edit(f"{site} kept", PLACES[site], partial(_values, into))]


def _values(into: Recorded, value: Any, site: Site) -> Any:
    if isinstance(value, tuple):
        return tuple(scan._replace(y=_leaf(into, (site.layer, n), scan.y)) for n, scan in enumerate(value))
    return _leaf(into, (site.layer, site.part), value)


def _states(into: Recorded, place: int, state: LayerState, site: Site) -> LayerState:
    return mapped(state, partial(_leaf, into, (site.layer, place)))


def _leaf(into: Recorded, key: tuple[int, int], value: Tensor) -> Tensor:
    """Return the value on a path of its own, so that its gradient covers only what comes after it."""
    if not value.is_floating_point():
        return value
    point = value + torch.zeros_like(value).requires_grad_(torch.is_grad_enabled())
    into.setdefault(key, []).append(point)
    return point
