"""Grid of patched runs, which start after what they share, and its approximation by one gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from ssmscope.core.batching import tokens_at_once
from ssmscope.core.edits import Edit, Place, Site, edited, new_state, recorded, replaced
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.ties import difference, levels, spearman
from ssmscope.core.trace import LayerState, States, gathered, mapped
from ssmscope.core.weights import weights_constant
from ssmscope.errors import InputError
from ssmscope.interp.edited_texts import EditedText, edited_texts
from ssmscope.interp.partial_runs import PlainRun, can_start_at_layer
from ssmscope.interp.scoring import answer_ids, check_heads, probability_and_logit
from ssmscope.interp.spans import positions_of

MAX_STATE_ENDS = 8
"""Number of tokens after which states are kept at once."""
PLACES: Mapping[str, Place] = {
    "output": "output", "residual": "residual", "convolution": "convolution", "head": "scans",
    "attention": "attention-output", "feed-forward": "feed-forward",
}  # fmt: skip
"""Places of the edits that read and patch a site's values."""
Cells = list[tuple[int | None, int]]
"""Layers, None for all together, and positions (or heads)."""

Recorded = dict[tuple[int, int], list[Tensor]]
"""Values of a run, by layer, and by the token after which a state is, or the convolution or recurrence."""


def aligned(clean: Batch, corrupted: Batch, spans: Sequence[str] = ()) -> list[tuple[int, int]]:
    """Return pairs of positions of corresponding tokens of two texts, in order.

    Spans, "words of the clean text=words of the corrupted one", cut both texts in parts. In each part equal tokens at
    the start correspond, and of the rest the last to the last, the one before to the one before, and so on; the tokens
    of the longer part that are left over have no partner. Texts of as many tokens, without spans, thus correspond
    position by position. Raises InputError for spans that are not such pairs, that cross, or that are not in the texts.
    """
    cuts = []
    for span in spans:
        names = span.split("=")
        if len(names) != 2:
            raise InputError(f"align is {span!r:.80}; write words of the clean text=words of the corrupted one")
        places = [positions_of(name, batch) for name, batch in zip(names, (clean, corrupted))]
        cuts.append([(own[0], own[-1] + 1) for own in places])
    ends, found = [0, 0], list[tuple[int, int]]()
    rows = [batch.input_ids[0].tolist() for batch in (clean, corrupted)]
    last = [(len(row), len(row)) for row in rows]
    for part in [*sorted(cuts), last]:
        if any(begin < end for (begin, _), end in zip(part, ends)):
            raise InputError("spans of align overlap, or come in another order in the corrupted text; give others")
        for stop in (0, 1):  # The tokens before a span, then its own.
            found += _paired(rows, ends, [span[stop] for span in part])
            ends = [span[stop] for span in part]
    return found


def _paired(rows: Sequence[list[int]], begins: Sequence[int], stops: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of one part of two texts."""
    sizes = [stop - begin for begin, stop in zip(begins, stops)]
    parts = [row[begin:stop] for row, begin, stop in zip(rows, begins, stops)]
    same = next((at for at, (own, other) in enumerate(zip(*parts)) if own != other), min(sizes))
    rest = range(min(sizes) - same, 0, -1)
    return [(begins[0] + at, begins[1] + at) for at in range(same)] + [(stops[0] - at, stops[1] - at) for at in rest]


def first_difference(clean: Batch, corrupted: Batch, pairs: Sequence[tuple[int, int]]) -> int:
    """Return the number of the first pair that is not the same text up to its tokens; raise InputError for texts that
    are the same, or the beginning of each other, or have no pair of equal tokens."""
    rows = [batch.input_ids[0].tolist() for batch in (clean, corrupted)]
    differ = np.array([rows[0][own] != rows[1][other] for own, other in pairs])
    if clean.values is not None and corrupted.values is not None:
        if len(rows[0]) != len(rows[1]):
            raise InputError(f"the clean series has {len(rows[0])} steps, the corrupted one {len(rows[1])}; give equal")
        differ[:] = False  # A class token comes last.
        differ[: clean.values.shape[1]] = (clean.values != corrupted.values)[0].any(-1).cpu()
    if len(rows[0]) == len(rows[1]) and not differ.any():
        raise InputError("the clean and the corrupted text have the same tokens; give two that differ")
    if differ.all() and clean.values is None:
        raise InputError("the clean and the corrupted text have no token in common; change only the words that matter")
    changed = differ | np.array([own != other or own != at for at, (own, other) in enumerate(pairs)])
    if not changed.any():
        raise InputError("one text is the beginning of the other: no patch changes a token; change words within it")
    return int(changed.argmax())


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
    """Runs of one text, `base`, with values of the run of another, `source`. `partners` has the source's position for
    positions of the base; by default the same one."""

    def __init__(self, model: Model, base: Batch, source: Batch, partners: Mapping[int, int] | None = None) -> None:
        self.model, self.base, self.source = model, base, source
        length = base.input_ids.shape[1]
        self.partners = dict(enumerate(range(length))) if partners is None else partners
        self.read = torch.tensor([self.partners.get(place, 0) for place in range(length)])
        self.layers, self.length = model.layer_numbers, base.input_ids.shape[1]
        tokens = tokens_at_once(model.device, width=model.width)
        self.reuse, self.at_once = can_start_at_layer(model, base), max(1, tokens // self.length)
        both = (base, source)
        self.pair = Batch(
            pad_sequence([each.input_ids[0] for each in both], batch_first=True),
            pad_sequence([each.mask[0] for each in both], batch_first=True),
            tuple(each.tokens[0] for each in both),
            tuple(each.words[0] for each in both),
            None if base.values is None else torch.cat([each.values for each in both if each.values is not None]),
        )

    def heads(self) -> int:
        heads = max(y.shape[2] for y in recorded_values(self.model, self.base, "head")[0].values())
        check_heads(self.model, heads, "patch another site")
        return heads

    def of_states(self, positions: Sequence[int]) -> Iterator[tuple[Cells, Tensor]]:
        """Yield cells with their logits, the state of a layer patched after a token."""
        layers: tuple[int | None, ...] = (None, *self.layers)
        if not self.model.continues:
            run = plain_from(self.model, self.base, 0, self.reuse)
            for place in positions:
                kept: dict[int, LayerState] = {}
                keep = new_state(self.partners[place], partial(first_state, kept))
                self.model.run(self.source, edits=keep, last_only=True)
                for layer in layers:
                    put = new_state(place, partial(first_state, kept), layers=None if layer is None else [layer])
                    yield [(layer, place)], run.again(layer, put)
        for places, states in self._after(positions) if self.model.continues else ():
            base, source = (gathered(states, torch.arange(which, 2 * len(places), 2)) for which in (0, 1))
            starts, rows = [place + 1 for place in places], [0] * len(places)
            batch = token_windows(self.base, rows, starts, [self.length] * len(places))
            run = PlainRun(self.model, batch, base, reuse=self.reuse, last_only=True)
            for layer in layers:
                own = tuple(source[at] if layer in (each, None) else base[at] for at, each in enumerate(self.layers))
                logits = run.again(layer, states=own + base[len(own) :])  # Attention keeps the base run's.
                yield [(layer, place) for place in places], logits

    def _after(self, positions: Sequence[int]) -> Iterator[tuple[Sequence[int], States]]:
        """Yield positions that run together and the states after them: for each the base run's, then the source's."""
        before: States | None = None
        at, most = [0, 0], min(MAX_STATE_ENDS, self.at_once)
        for first in range(0, len(positions), most):
            places = positions[first : first + most]
            both, ends = [0, 1] * len(places), [e for place in places for e in (place + 1, self.partners[place] + 1)]
            start = None if before is None else gathered(before, torch.tensor(both))
            windows = token_windows(self.pair, both, at * len(places), ends)
            after = self.model.run(windows, start, last_only=True).states
            before, at = gathered(after, torch.tensor([-2, -1]) + len(ends)), ends[-2:]
            yield places, after

    def of_values(self, site: str, positions: Sequence[int]) -> Iterator[tuple[Cells, Tensor]]:
        """Yield cells with their logits: a layer's value patched at a token, or a head's output at all of them."""
        heads, place = site == "head", PLACES[site]
        kept, patched = recorded_values(self.model, self.source, site)
        columns = list(range(max(value.shape[2] for value in kept.values()))) if heads else list(positions)
        for chosen in (
            columns[at : at + self.at_once] for at in range(0, len(columns) if positions else 0, self.at_once)
        ):
            start = (min(positions) if heads else chosen[0]) if self.model.continues else 0
            run = plain_from(self.model, self.base, start, self.reuse)
            values = {key: value[:, start:] for key, value in self._moved(kept).items()}
            for layer in patched if heads else (None, *patched):
                count = kept[layer, 0].shape[2] if heads else self.length
                own = [each for each in chosen if each < count]
                rows = torch.zeros(len(own), self.length - start, *[count] * heads, dtype=torch.bool)
                for row, each in zip(rows, own):
                    row[([at - start for at in positions], each) if heads else each - start] = True
                edit = replaced(place, values, rows=dict.fromkeys(patched if layer is None else [layer], rows))
                yield [(layer, each) for each in own], run.again(layer, edit, len(own))

    def edit(self, site: str, positions: Sequence[int], layer: int | None, column: int) -> Edit:
        """Return the patch of one cell, or of all layers at its token."""
        own = None if layer is None else [layer]
        if site == "state":
            states: dict[int, LayerState] = {}
            put = partial(first_state, states)
            self.model.run(self.source, edits=new_state(self.partners[positions[column]], put), last_only=True)
            return new_state(positions[column], put, layers=own)
        kept, patched = recorded_values(self.model, self.source, site)
        kept = self._moved(kept)
        if site == "head":
            return replaced("scans", kept, positions, layers=own, heads=[column])
        return replaced(PLACES[site], kept, [positions[column]], layers=own or patched)

    def _moved(self, kept: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Return the source's values (1, length, …) at the positions of the base."""
        return {key: value[:, self.read.to(value.device)] for key, value in kept.items()}


def recorded_values(model: Model, batch: Batch, site: str) -> tuple[dict[Any, Tensor], list[int]]:
    """Return a run's values at a site, and the layers that have it. Raise InputError if none has."""
    kept: dict[Any, Tensor] = {}
    model.run(batch, edits=recorded(PLACES[site], kept), last_only=True)
    if not kept:
        raise InputError(f"the layers of {model.name} have no {site}; patch another site")
    return kept, sorted({key[0] if isinstance(key, tuple) else key for key in kept})


def plain_from(model: Model, batch: Batch, start: int, reuse: bool) -> PlainRun:
    """Return the plain run of texts from a token on; from the first they may differ in length."""
    rows = range(len(batch.tokens))
    begins, ends = [start] * len(rows), batch.mask.sum(1).tolist()
    states = model.run(token_windows(batch, rows, [0] * len(rows), begins), last_only=True).states if start else None
    return PlainRun(model, token_windows(batch, rows, begins, ends), states, reuse=reuse, last_only=True)


def token_windows(batch: Batch, rows: Sequence[int], begins: Sequence[int], ends: Sequence[int]) -> Batch:
    """Return the tokens begin ≤ t < end of these rows of texts of one length, padded on the right."""
    first, last = torch.tensor(begins)[:, None], torch.tensor(ends)[:, None]
    at = first + torch.arange(int((last - first).max()))
    chosen, device = torch.tensor(rows)[:, None], batch.mask.device
    spans = list(zip(rows, begins, ends))
    values = batch.values
    if values is not None:
        values = values[chosen.to(device), at.clamp(max=values.shape[1] - 1).to(device)]
    return Batch(
        batch.input_ids[chosen.to(device), at.clamp(max=batch.input_ids.shape[1] - 1).to(device)],
        (at < last).to(device),
        tuple(batch.tokens[row][begin:end] for row, begin, end in spans),
        tuple(batch.words[row][begin:end] for row, begin, end in spans),
        values,
    )


def first_state(kept: dict[int, LayerState], state: LayerState, site: Site) -> LayerState:
    """Return the first state that a layer had, which `kept` keeps."""
    return kept.setdefault(site.layer, state)


def written(runs: PatchRuns, edits: Mapping[str, Edit], tokens: int) -> tuple[EditedText, ...]:
    """Return what is written after the patched text, without and with edits, and, as text 1, after the other."""
    own = edited_texts(runs.model, runs.base, {name: [edit] for name, edit in edits.items()}, tokens)
    (other,) = edited_texts(runs.model, runs.source, {}, tokens)
    return (*own, replace(other, prompt=1))


def measure(model: Model, logits: Tensor, ids: tuple[int, int]) -> np.ndarray:
    """Return the answer's probability and the difference of the logits, (rows, 2)."""
    probability, right = probability_and_logit(model, logits, ids[0])
    return torch.stack([probability, right - logits[:, ids[1]].double()], dim=1).cpu().numpy()


def attributed(runs: PatchRuns, site: str, positions: Sequence[int], ids: tuple[int, int]) -> np.ndarray:
    """Return (a_source − a_base) · ∂m/∂a, (layers, positions) or (layers, heads), m the difference of the logits of
    answer and contrast in the base run (attribution patching, Nanda 2023; Syed et al. 2023, Eq. 2)."""
    kept: tuple[Recorded, Recorded] = ({}, {})
    with torch.no_grad():
        theirs = [runs.partners[place] for place in positions]
        _logits(runs.model, runs.source, _edits(site, theirs, kept[1]))
    with torch.enable_grad(), weights_constant(runs.model.module):
        logits = _logits(runs.model, runs.base, _edits(site, positions, kept[0]))
        if not kept[0]:
            raise InputError(f"the layers of {runs.model.name} have no {site}; patch another site")
        metric = (logits[:, ids[0]].double() - logits[:, ids[1]].double()).sum()
        points = [point for own in kept[0].values() for point in own]
        gradients: Iterator[Tensor | None] = iter(torch.autograd.grad(metric, points, allow_unused=True))
    found = np.zeros((len(runs.layers), runs.heads() if site == "head" else len(positions)))
    column = {place: number for number, place in enumerate(positions)}
    for (number, part), own in kept[0].items():
        states, layer = site == "state", runs.layers.index(number)
        for point, other in zip(own, kept[1][number, runs.partners[part] if states else part]):
            other = other if states else other[:, runs.read.to(other.device)]
            gradient = next(gradients)
            if gradient is None:
                continue
            # Where both are the same infinity, as in empty memories, nothing changes.
            change = torch.where(point == other, 0.0, other.double() - point.detach().double())
            effect = (change * gradient.double())[0].cpu()
            if states:
                found[layer, column[part]] += float(effect.sum())
            elif site == "head":
                heads = effect[list(positions)].sum((0, 2)).numpy()
                found[layer, : len(heads)] += heads
            else:
                found[layer] += effect[list(positions)].flatten(1).sum(1).numpy()
    return found


def agreement(attributed: np.ndarray, patched: np.ndarray, base: float) -> tuple[float, float]:
    """Return Pearson's and Spearman's correlation over the cells of the attributed changes from `base` and the patched
    differences of logits; NaN where one grid is constant."""
    first, second = attributed.ravel(), difference(patched.ravel(), base)
    size = float(np.abs(patched).max())
    ranks = spearman(levels(first, size), levels(second, size))
    constant = first.std() == 0 or second.std() == 0
    return (np.nan if constant else float(np.corrcoef(first, second)[0, 1])), ranks


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
