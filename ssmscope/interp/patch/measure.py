"""A grid of patched runs: every cell's logits, from runs that begin behind what they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssmscope.batching import TOKENS_AT_ONCE
from ssmscope.edits import Edit, Site, edited, new_state, recorded, replaced
from ssmscope.encoding import Batch
from ssmscope.errors import InputError
from ssmscope.interp.answers import answers, measured
from ssmscope.interp.patch.attribution import agreement, attributed
from ssmscope.interp.patch.result import Patching
from ssmscope.interp.resuming import Joining
from ssmscope.interp.spans import positions_of
from ssmscope.model import Model
from ssmscope.reads import one_text
from ssmscope.results import record_provenance
from ssmscope.states import States, gathered, tensors
from ssmscope.trace import LayerState

ENDS = 8
"""Behind how many tokens states are kept at once."""
MOST_HEADS = 256
"""Of a layer: with more they are channels, one by one."""

Cells = list[tuple[int | None, int]]
"""Layers, None for all together, and positions (or heads)."""


def patched(
    model: Model,
    clean: str | Sequence[int],
    corrupted: str | Sequence[int],
    site: str,
    direction: str,
    metric: str,
    positions: str | None,
    method: str,
    answer: int | str | None,
    contrast: int | str | None,
) -> Patching:
    """See `ssmscope.patch`."""
    pair = one_text(model, clean), one_text(model, corrupted)
    first = first_difference(*pair)
    length = pair[0].input_ids.shape[1]
    chosen = list(range(length)) if positions is None else list(positions_of(positions, pair[0]))
    if site == "state":
        chosen = [place for place in chosen if place < length - 1]
        if not chosen:
            raise InputError("behind the last token no state is read any more; give positions before it")
    ids, names = asked(model, pair, answer, contrast)
    runs = Runs(model, *(pair[::-1] if direction == "denoise" else pair))
    plain = np.array([_measure(_last(model, batch), ids)[0] for batch in (runs.base, runs.source)])
    if site == "head":
        shape = (model.num_layers, runs.heads())
        found: Iterator[tuple[Cells, Tensor]] = runs.of_heads([place for place in chosen if place >= first])
        columns = list(range(shape[1]))
    else:
        shape = (model.num_layers + 1, len(chosen))
        later = [place for place in chosen if place >= first]
        found = runs.of_states(later) if site == "state" else runs.of_positions(site, later)
        columns = chosen
    values = np.broadcast_to(plain[0], (*shape, 2)).copy()  # before the first difference both runs are one
    column = {place: number for number, place in enumerate(columns)}
    exact = method != "gradient"
    for cells, logits in found if exact else ():
        rows = [model.num_layers if layer is None else layer for layer, _ in cells]
        values[rows, [column[place] for _, place in cells]] = _measure(logits, ids)
    approximate, agree = np.zeros((0, 0)), (np.nan, np.nan)
    if method != "exact":
        later = [place for place in chosen if place >= first]
        approximate = np.zeros((model.num_layers, len(columns)))
        own = slice(None) if site == "head" else [column[place] for place in later]
        if later:
            approximate[:, own] = attributed(runs, site, later, ids)
        if exact and later:
            agree = agreement(approximate[:, own], values[: model.num_layers, own, 1] - plain[0, 1])
        elif not exact:
            values[...] = np.nan
            values[: model.num_layers, :, 1] = plain[0, 1] + approximate
    given = [each if isinstance(each, str) else list(each) for each in (clean, corrupted)]
    options: dict[str, Any] = dict(zip(("clean", "corrupted"), given)) | {
        "site": site,
        "direction": direction,
        "metric": metric,
    }
    options |= {"positions": positions, "method": method, "answer": answer, "contrast": contrast}
    return Patching(
        provenance=record_provenance(model.source, options=options),
        clean=pair[0].tokens[0],
        corrupted=pair[1].tokens[0],
        site=site,
        direction=direction,
        metric=metric,
        positions=tuple(chosen),
        answer=names[0],
        contrast=names[1],
        base=plain[0],
        other=plain[1],
        values=values,
        attributed=approximate,
        agreement=agree,
    )


def first_difference(clean: Batch, corrupted: Batch) -> int:
    """The first position at which two texts differ.

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
        raise InputError("the clean and the corrupted text have no token in common; change the words that matter alone")
    return int(differ.nonzero()[0])


def asked(
    model: Model, pair: tuple[Batch, Batch], answer: int | str | None, contrast: int | str | None
) -> tuple[tuple[int, int], tuple[str, str]]:
    """The answer and its contrast.

    Raises:
        InputError: they are the same.
    """
    (right, *_), (name, *_) = answers(model, pair[0], answer)
    (wrong, *_), (other, *_) = answers(model, pair[1], contrast)
    if right == wrong:
        both = answer is None and contrast is None
        how = f"both texts have the answer {name!r}" if both else f"answer and contrast are both {name!r}"
        raise InputError(f"{how}; name two that differ with --answer and --contrast")
    return (right, wrong), (name, other)


class Runs:
    """Runs of one text, `base`, with what the run of another, `source`, had."""

    def __init__(self, model: Model, base: Batch, source: Batch) -> None:
        self.model, self.base, self.source = model, base, source
        self.layers, self.length = range(model.num_layers), base.input_ids.shape[1]
        self.joining = Joining(model, base)
        both = (base, source)
        self.pair = Batch(
            torch.cat([each.input_ids for each in both]),
            torch.cat([each.mask for each in both]),
            tuple(each.tokens[0] for each in both),
            tuple(each.words[0] for each in both),
        )

    def heads(self) -> int:
        """The most heads of a layer.

        Raises:
            InputError: they are single channels.
        """
        kept: dict[Any, Tensor] = {}
        self.model.run(self.base, edits=recorded("scans", kept), last_only=True)
        heads = max(y.shape[2] for y in kept.values())
        if heads > MOST_HEADS:
            raise InputError(f"the {heads:,} heads of {self.model.name} are single channels; patch another site")
        return heads

    def of_states(self, positions: Sequence[int]) -> Iterator[tuple[Cells, Tensor]]:
        """Cells with their logits, the state of a layer patched behind a token."""
        cells: list[int | None] = [None, *self.layers]
        rows = [torch.tensor([int(own in (layer, None)) for own in cells]) for layer in self.layers]
        for place, states in self._states_behind(sorted(positions)):
            named: Cells = [(layer, place) for layer in cells]
            if states is not None:
                counts = self._counts(named)
                mixed = tuple(gathered((state,), row[:count])[0] for state, row, count in zip(states, rows, counts))
                mixed += gathered(states[len(rows) :], torch.zeros(len(cells), dtype=torch.long))  # of attention
                yield named, self._logits(named, place + 1, mixed, [])
            else:
                kept: dict[int, Any] = {}
                keep = new_state(place, partial(_kept, kept))
                self.model.run(self.pair, edits=keep, last_only=True)
                put = new_state(place, partial(_put, kept, rows))
                yield named, self._logits(named, 0, None, [put])

    def _states_behind(self, positions: Sequence[int]) -> Iterator[tuple[int, States | None]]:
        """These positions in their order with the states behind them, the base run's in row 0 and the source's in row
        1; without states of a model that cannot continue from them.

        Several positions are one run, whose rows have different ends.
        """
        if not self.model.continues:
            yield from ((place, None) for place in positions)
            return
        states: States | None = None
        at = 0
        for first in range(0, len(positions), ENDS):
            chosen = positions[first : first + ENDS]
            batch = between(self.pair, at, chosen[-1] + 1).rows([0, 1] * len(chosen))
            ends = [place + 1 - at for place in chosen for _ in self.pair.tokens]
            cut = replace(
                batch,
                mask=torch.arange(ends[-1]) < torch.tensor(ends)[:, None],
                tokens=tuple(own[:end] for own, end in zip(batch.tokens, ends)),
                words=tuple(own[:end] for own, end in zip(batch.words, ends)),
            )
            start = None if states is None else gathered(states, torch.tensor([0, 1] * len(chosen)))
            after = self.model.run(cut.to(batch.mask.device), start, last_only=True).states
            for number, place in enumerate(chosen):
                yield place, gathered(after, torch.tensor([2 * number, 2 * number + 1]))
            states = gathered(after, torch.tensor([len(ends) - 2, len(ends) - 1]))
            at = chosen[-1] + 1

    def of_positions(self, site: Any, positions: Sequence[int]) -> Iterator[tuple[Cells, Tensor]]:
        """Cells with their logits, what a layer has at `site` patched at a token."""
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
            yield chosen, self._logits(chosen, start, states, [replaced(site, values, rows=rows)])

    def of_heads(self, positions: Sequence[int]) -> Iterator[tuple[Cells, Tensor]]:
        """Cells with their logits, what a head reads of the state patched at all of these tokens."""
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
            yield chosen, self._logits(chosen, start, states, [replaced("scans", values, rows=rows)])

    def _chunks(self, cells: Cells, begins: Sequence[int]) -> Iterator[tuple[Cells, int, States | None]]:
        """Cells that are run together, where they begin, and the base run's state there; `begins` is sorted."""
        at, done, states = 0, 0, None
        while done < len(cells):
            start = begins[done] if self.model.continues else 0
            if start > at:
                states = self.model.run(between(self.base, at, start), states, last_only=True).states
                at = start
            count = max(1, TOKENS_AT_ONCE // (self.length - start))
            chosen = sorted(cells[done : done + count], key=_layer_of)
            begin = None
            if states is not None:
                counts = self._counts(chosen)
                own = [torch.zeros(n, dtype=torch.long) for n in counts]
                begin = tuple(gathered((state,), rows)[0] for state, rows in zip(states, own))
                begin += gathered(states[len(counts) :], torch.zeros(len(chosen), dtype=torch.long))  # of attention
            yield chosen, start, begin
            done += count

    def _counts(self, cells: Cells) -> list[int]:
        """How many of these cells' rows each layer runs; they are in the order of their layers."""
        layers = [_layer_of(cell) for cell in cells]
        return self.joining.counts(layers) if self.joining.works else [len(cells)] * len(self.layers)

    def _logits(self, cells: Cells, start: int, states: States | None, edits: Sequence[Edit]) -> Tensor:
        """The last logits of runs of the base text from a token on, one for each cell, in the order of their layers."""
        batch = between(self.base, start, self.length).rows([0] * len(cells))
        with ExitStack() as around:
            if self.joining.works:
                around.enter_context(self.joining.rows([_layer_of(cell) for cell in cells], start))
            around.enter_context(edited(self.model, edits))
            around.enter_context(torch.no_grad())
            around.enter_context(self.model.running(mask=batch.mask, states=states))
            return self.model.forward(batch, last_only=True)


def _layer_of(cell: tuple[int | None, int]) -> int:
    """From which layer on a cell's run differs from the base run; 0 where all layers are patched."""
    return cell[0] or 0


def _kept(into: dict[int, LayerState], state: LayerState, site: Site) -> LayerState:
    """Keep the state of a layer, and change nothing."""
    return into.setdefault(site.layer, state)


def _put(kept: Mapping[int, LayerState], rows: Sequence[Tensor], state: LayerState, site: Site) -> LayerState:
    """The kept state of a layer, of the rows that it is patched in, of as many rows as the run has there."""
    return gathered((kept[site.layer],), rows[site.layer][: len(tensors((state,))[0])])[0]


def between(batch: Batch, start: int, stop: int) -> Batch:
    """The tokens start ≤ t < stop of texts of one length."""
    return Batch(
        batch.input_ids[:, start:stop],
        batch.mask[:, start:stop],
        tuple(tokens[start:stop] for tokens in batch.tokens),
        tuple(words[start:stop] for words in batch.words),
    )


def _last(model: Model, batch: Batch) -> Tensor:
    return model.run(batch, last_only=True).logits


def _measure(logits: Tensor, ids: tuple[int, int]) -> np.ndarray:
    """The answer's probability and the difference of the logits, (rows, 2)."""
    probability, right = measured(logits, ids[0])
    return torch.stack([probability, right - measured(logits, ids[1])[1]], dim=1).cpu().numpy()
