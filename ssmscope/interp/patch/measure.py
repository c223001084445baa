"""Grid of patched runs: every cell's logits, from runs that start after what they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssmscope.core.batching import TOKENS_AT_ONCE
from ssmscope.core.edits import Edit, Site, edited, new_state, recorded, replaced
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerState, States, gathered, tensors
from ssmscope.errors import InputError
from ssmscope.interp.interventions import answer_ids, check_heads, probability_and_logit
from ssmscope.interp.resuming import JoiningRun, token_windows

MAX_STATE_ENDS = 8
"""Number of tokens after which states are kept at once."""
STREAM_NUMBERS_AT_ONCE = 2**21
"""Numbers of the residual stream that run at once, where that is more than `TOKENS_AT_ONCE` tokens: in narrow models a
call costs more than its tokens."""

Cells = list[tuple[int | None, int]]
"""Layers, None for all together, and positions (or heads)."""


def first_difference(clean: Batch, corrupted: Batch) -> int:
    """Return the first position at which two texts differ.

    Raises:
        InputError: they have different lengths, do not differ, or have no token in common.
    """
    lengths = [batch.input_ids.shape[1] for batch in (clean, corrupted)]
    if lengths[0] != lengths[1]:
        raise InputError(
            f"the clean text has {lengths[0]} tokens and the corrupted one {lengths[1]}; give texts of as many tokens"
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
    """Return the ids and the names of the answer and its contrast.

    Raises:
        InputError: they are the same.
    """
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
        self.at_once = (
            max(TOKENS_AT_ONCE, STREAM_NUMBERS_AT_ONCE // self.joining.width) if self.joining.works else TOKENS_AT_ONCE
        )
        both = (base, source)
        self.pair = Batch(
            torch.cat([each.input_ids for each in both]),
            torch.cat([each.mask for each in both]),
            tuple(each.tokens[0] for each in both),
            tuple(each.words[0] for each in both),
        )

    def heads(self) -> int:
        """Return the largest number of heads of a layer.

        Raises:
            InputError: they are single channels.
        """
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
                counts = self._counts(cells)
                mixed = tuple(gathered((state,), row[:count])[0] for state, row, count in zip(states, rows, counts))
                # Attention keeps the base run's keys and values.
                mixed += gathered(states[len(rows) :], torch.zeros(len(cells), dtype=torch.long))
                yield cells, self._logits(cells, [place + 1 for _, place in cells], mixed, [])
            else:
                kept: dict[int, Any] = {}
                keep = new_state(places[0], partial(_kept, kept))
                self.model.run(self.pair, edits=keep, last_only=True)
                put = new_state(places[0], partial(_put, kept, rows))
                yield cells, self._logits(cells, [0] * len(cells), None, [put])

    def _groups(self, positions: Sequence[int]) -> Iterator[tuple[Sequence[int], States | None]]:
        """Yield positions whose cells run together, with the states after them: for each position the base run's, then
        the source's; one by one and without states for a model that cannot continue from them.

        The states after several tokens come from one run, whose rows have different ends.
        """
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

    def of_positions(self, site: Any, positions: Sequence[int]) -> Iterator[tuple[Cells, Tensor]]:
        """Yield cells with their logits, a layer's value at `site` patched at a token."""
        kept: dict[Any, Tensor] = {}
        self.model.run(self.source, edits=recorded(site, kept), last_only=True)
        if not kept:
            raise InputError(f"the layers of {self.model.name} have no {site}; patch another site")
        patched = {key[0] if isinstance(key, tuple) else key for key in kept}
        cells: Cells = [(layer, place) for place in sorted(positions) for layer in (None, *sorted(patched))]
        for chosen, start, states in self._chunks(cells, [place for _, place in cells]):
            counts = self._counts(chosen)
            rows = {}
            for layer in patched:
                rows[layer] = torch.zeros(counts[layer], self.length - start, dtype=torch.bool)
                for row, (own, place) in enumerate(chosen[: counts[layer]]):
                    rows[layer][row, place - start] = own in (layer, None)
            values = {key: value[:, start:] for key, value in kept.items()}
            yield chosen, self._logits(chosen, [start] * len(chosen), states, [replaced(site, values, rows=rows)])

    def of_heads(self, positions: Sequence[int]) -> Iterator[tuple[Cells, Tensor]]:
        """Yield cells with their logits, a head's output patched at all of these tokens."""
        if not positions:
            return
        kept: dict[Any, Tensor] = {}
        self.model.run(self.source, edits=recorded("scans", kept), last_only=True)
        cells: Cells = [(layer, head) for layer in self.layers for head in range(kept[layer, 0].shape[2])]
        first = min(positions)
        for chosen, start, states in self._chunks(cells, [first] * len(cells)):
            rows, counts = {}, self._counts(chosen)
            for layer in self.layers:
                heads = kept[layer, 0].shape[2]
                rows[layer] = torch.zeros(counts[layer], self.length - start, heads, dtype=torch.bool)
                for row, (own, head) in enumerate(chosen[: counts[layer]]):
                    if own == layer:
                        rows[layer][row, [place - start for place in positions], head] = True
            values = {key: value[:, start:] for key, value in kept.items()}
            yield chosen, self._logits(chosen, [start] * len(chosen), states, [replaced("scans", values, rows=rows)])

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
            begin = None
            if states is not None:
                counts = self._counts(chosen)
                own = [torch.zeros(n, dtype=torch.long) for n in counts]
                begin = tuple(gathered((state,), rows)[0] for state, rows in zip(states, own))
                begin += gathered(states[len(counts) :], torch.zeros(len(chosen), dtype=torch.long))
            yield chosen, start, begin
            done += count

    def _counts(self, cells: Cells) -> list[int]:
        """Return the number of these cells' rows that each layer runs; cells are in the order of their layers."""
        layers = [_layer_of(cell) for cell in cells]
        return self.joining.counts(layers) if self.joining.works else [len(cells)] * len(self.layers)

    def _logits(self, cells: Cells, begins: Sequence[int], states: States | None, edits: Sequence[Edit]) -> Tensor:
        """Return the last logits of runs of the base text from some token on, one for each cell, in the order of their
        layers.

        Rows that begin later are padded on the right, where nothing of them is read any more: layers need no mask.
        """
        batch = token_windows(self.base, [0] * len(cells), begins, [self.length] * len(cells))
        with ExitStack() as around:
            if self.joining.works:
                around.enter_context(self.joining.rows([_layer_of(cell) for cell in cells], begins))
            if edits:
                around.enter_context(edited(self.model, edits))
            around.enter_context(torch.no_grad())
            around.enter_context(self.model.running(mask=torch.ones_like(batch.mask), states=states))
            return self.model.forward(batch, last_only=True)


def _layer_of(cell: tuple[int | None, int]) -> int:
    """Return the layer from which on a cell's run differs from the base run; 0 where all layers are patched."""
    return cell[0] or 0


def _kept(into: dict[int, LayerState], state: LayerState, site: Site) -> LayerState:
    """Keep the state of a layer, and change nothing."""
    return into.setdefault(site.layer, state)


def _put(kept: Mapping[int, LayerState], rows: Sequence[Tensor], state: LayerState, site: Site) -> LayerState:
    """Return the kept state of a layer for the rows in which it is patched, out of those that run there."""
    return gathered((kept[site.layer],), rows[site.layer][: len(tensors((state,))[0])])[0]


def measure(model: Model, logits: Tensor, ids: tuple[int, int]) -> np.ndarray:
    """Return the answer's probability and the difference of the logits, (rows, 2)."""
    probability, right = probability_and_logit(model, logits, ids[0])
    return torch.stack([probability, right - logits[:, ids[1]].double()], dim=1).cpu().numpy()
