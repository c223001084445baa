"""Patching over pairs of texts: means of grids by layer and position class, several sites at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from ssmscope.core.batching import tokens_at_once
from ssmscope.core.edits import new_state, replaced
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.progress import progress_bar
from ssmscope.core.trace import LayerState
from ssmscope.data.pairs import PairData
from ssmscope.errors import InputError
from ssmscope.interp.pairs import EncodedPairs
from ssmscope.interp.partial_runs import PlainRun, can_start_at_layer, note_on_attention
from ssmscope.interp.patch.measure import (
    PLACES,
    aligned,
    first_difference,
    first_state,
    plain_from,
    recorded_values,
    token_windows,
)
from ssmscope.interp.spans import positions_of

Places = dict[str, list[tuple[int, ...]]]
"""Positions of each class in every pair."""
CHANGED = "changed"
"""Class of the tokens that differ from those they correspond to, where texts have no positions in common."""


def position_classes(pairs: EncodedPairs, data: PairData, partners: Sequence[Mapping[int, int]]) -> Places:
    """Return the positions in the clean texts of the classes that the data name, and of "last"; without classes every
    position from the first that differs on, or, of texts that differ in length, of `CHANGED`. Raise InputError where
    words are missing."""
    batch, lengths = pairs.clean, pairs.clean.lengths
    if data.spans:
        found: Places = {}
        for name, words in data.spans.items():
            if not all(words):
                raise InputError(
                    f"pair {words.index('') + 1} of {data.name} has no {name}; give its words or positions"
                )
            found[name] = [positions_of(each, batch, row) for row, each in enumerate(words)]
        return {**found, "last": [(length - 1,) for length in lengths]}
    if len({*lengths, *pairs.corrupted.lengths}) > 1:
        clean, corrupted = (each.input_ids.tolist() for each in (pairs.clean, pairs.corrupted))
        changed = [
            tuple(own for own, other in each.items() if clean[row][own] != corrupted[row][other])
            for row, each in enumerate(partners)
        ]
        return {CHANGED: changed, "last": [(length - 1,) for length in lengths]}
    differ = (pairs.clean.input_ids != pairs.corrupted.input_ids).any(0)
    first = int(differ.nonzero()[0])
    return {str(place): [(place,)] * len(pairs) for place in range(first, lengths[0])}


def partners_of(pairs: EncodedPairs, data: PairData) -> list[dict[int, int]]:
    """Return by pair the positions of a clean text and those of the corrupted one that they correspond to, as for two
    texts (`aligned`). Raise InputError, naming the pair, for texts that have too little in common."""
    found = []
    for row in range(len(pairs)):
        both = pairs.clean.rows([row]), pairs.corrupted.rows([row])
        found.append(dict(partners := aligned(*both)))
        try:
            first_difference(*both, partners)
        except InputError as error:
            raise InputError(f"pair {row + 1} of {data.name}: {error}") from error
    return found


class PairGrids:
    """Grids of patched runs of pairs, batches of them together; `base` and `other` (pairs,) are the differences of
    logits of the run that is patched and of the one that the patches are from."""

    def __init__(self, pairs: EncodedPairs, direction: str, partners: Sequence[Mapping[int, int]]) -> None:
        self.pairs, self.model, self.partners = pairs, pairs.model, partners
        turned = [{other: own for own, other in each.items()} for each in partners]
        self.sources = turned if direction == "denoise" else partners
        """Positions, by pair, of the source's value by that of the run that is patched."""
        self.direction = direction
        both = (pairs.corrupted, pairs.clean)
        self.into, self.source = both if direction == "denoise" else both[::-1]
        self.reuse = can_start_at_layer(self.model, self.into.rows([0]))
        self.batches = [*pairs.batches(tokens_at_once(self.model.device, width=self.model.width))]
        self.base, self.other = (pairs.plain(batch) for batch in (self.into, self.source))

    def grid(self, site: str, classes: Places) -> tuple[list[int], np.ndarray]:
        """Return the numbers of the layers, and the change of the difference of logits, (pairs, layers, classes), NaN
        where nothing is patched."""
        classes = {name: [*map(self._own, spans, self.partners)] for name, spans in classes.items()}
        found = np.full((len(self.pairs), 0, len(classes)), np.nan)
        with progress_bar() as bar:
            for rows in bar.track(self.batches, description=f"patched {site}"):
                cells = self._states(rows, classes) if site == "state" else self._values(site, rows, classes)
                for own, layer, column, logits in cells:
                    if layer >= found.shape[1]:
                        more = np.full((len(found), layer + 1 - found.shape[1], len(classes)), np.nan)
                        found = np.concatenate([found, more], axis=1)
                    found[own, layer, column] = self.pairs.measure(logits, own).cpu().numpy() - self.base[own]
        used = (~np.isnan(found).all((0, 2))).nonzero()[0]
        return used.tolist(), found[:, used]

    def _own(self, span: tuple[int, ...], partners: Mapping[int, int]) -> tuple[int, ...]:
        """Return the positions of a class that have a partner, in the run that is patched."""
        return tuple(partners[at] if self.direction == "denoise" else at for at in span if at in partners)

    def _values(self, site: str, rows: list[int], classes: Places) -> Iterator[tuple[list[int], int, int, Tensor]]:
        source, into = self.source.rows(rows), self.into.rows(rows)
        kept, patched = recorded_values(self.model, source, site)
        in_mixers = site in ("output", "residual", "convolution")
        size = range(into.input_ids.shape[1])
        at = torch.tensor([[self.sources[row].get(place, 0) for place in size] for row in rows])
        kept = {key: value[torch.arange(len(rows))[:, None], at] for key, value in kept.items()}
        for column, spans in enumerate(classes.values()):
            start = self._start([spans[row] for row in rows], into) if in_mixers else 0
            run = plain_from(self.model, into, start, self.reuse)
            mask = torch.zeros(len(rows), into.input_ids.shape[1], dtype=torch.bool)
            for line, row in zip(mask, rows):
                line[list(spans[row])] = True
            values = {key: value[:, start:] for key, value in kept.items()}
            there = mask.any(1)
            own = [row for row in rows if spans[row]]
            for layer in patched if own else ():
                edit = replaced(PLACES[site], values, rows={layer: mask[:, start:]})
                logits = run.again(layer if in_mixers else None, edit)
                yield own, layer, column, logits[there.to(logits.device)]

    def _start(self, spans: Sequence[tuple[int, ...]], batch: Batch) -> int:
        """Return the number of tokens before which a patched run is the plain one."""
        spans = [span for span in spans if span]
        return min(map(min, spans)) if spans and self.model.continues and len(set(batch.lengths)) == 1 else 0

    def _states(self, rows: list[int], classes: Places) -> Iterator[tuple[list[int], int, int, Tensor]]:
        """Patch the states after a class's last token, of the pairs in which it stands at one position together."""
        for column, spans in enumerate(classes.values()):
            ends: dict[tuple[int, int, int], list[int]] = {}
            for row in rows:
                end, last = max(spans[row], default=-1), self.into.lengths[row] - 1
                if 0 <= end < last and (other := self.sources[row][end]) < self.source.lengths[row] - 1:
                    ends.setdefault((end, other, last + 1), []).append(row)
            for (end, other, length), own in ends.items():
                into, source = self.into.rows(own), self.source.rows(own)
                if self.model.continues:
                    each = range(len(own))
                    stops, others = ([at + 1] * len(own) for at in (end, other))
                    both = (into, stops), (source, others)
                    heads = [token_windows(batch, each, [0] * len(own), to) for batch, to in both]
                    before, after = (self.model.run(head, last_only=True).states for head in heads)
                    window = token_windows(into, each, stops, [length] * len(own))
                    run = PlainRun(self.model, window, before, reuse=self.reuse, last_only=True)
                    for at, layer in enumerate(self.model.layer_numbers):
                        states = (*before[:at], after[at], *before[at + 1 :])
                        yield own, layer, column, run.again(layer, states=states)
                    continue
                kept: dict[int, LayerState] = {}
                self.model.run(source, edits=new_state(other, partial(first_state, kept)), last_only=True)
                run = PlainRun(self.model, into, reuse=self.reuse, last_only=True)
                for layer in self.model.layer_numbers:
                    put = new_state(end, partial(first_state, kept), layers=[layer])
                    yield own, layer, column, run.again(layer, put)


def patch_pairs(model: Model, data: Any, sites: Sequence[str], direction: str, limit: int | None, seed: int) -> Any:
    """Return a `PairPatching` of these sites; see `patch`."""
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.data.pairs import read_pairs
    from ssmscope.interp.pairs import encode_pairs, shares, whole_of
    from ssmscope.interp.patch.result import PairPatching

    given = read_pairs(data).take(limit)
    pairs = encode_pairs(model, given, unequal=True)
    partners = partners_of(pairs, given)
    classes = position_classes(pairs, given, partners)
    if "attention" not in sites:
        note_on_attention(model, "patched")
    grids = PairGrids(pairs, direction, partners)
    found = [grids.grid(site, classes) for site in sites]
    names = tuple((site, layer) for site, (layers, _) in zip(sites, found) for layer in layers)
    changes = np.concatenate([grid for _, grid in found], axis=1)
    whole = whole_of(given.name, grids.other, grids.base)
    values = np.full((*changes.shape[1:], 3), np.nan)
    for cell in zip(*(~np.isnan(changes)).any(0).nonzero()):
        own = ~np.isnan(changes[(slice(None), *cell)])
        values[cell] = shares(changes[(own, *cell)][:, None], whole[own], seed)[0]
    return PairPatching(
        provenance=record_provenance(model.source, options=call_options(sites=list(sites)), seed=seed, data=given),
        pairs=len(given),
        direction=direction,
        sites=tuple(site for site, _ in names),
        layers=tuple(layer for _, layer in names),
        classes=tuple(classes),
        base=float(grids.base.mean()),
        other=float(grids.other.mean()),
        values=values,
    )
