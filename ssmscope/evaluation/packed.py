"""Pieces of rows in one run of a model: the products of all their tokens together, what looks back piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ssmscope.batching import by_length
from ssmscope.edits import edits_of
from ssmscope.encoding import Batch
from ssmscope.evaluation.forking import FEWER, Pieces, Rows, as_bytes, ways_to_fork, whole
from ssmscope.evaluation.running import Read, groups, rows_together, run_batch
from ssmscope.intercept import Handler, has_hooks, is_own, taken_over
from ssmscope.mixers import Handed, computed_by, looks_ahead, reader_of, run_linear, terms_of
from ssmscope.model import Model
from ssmscope.scans.native import Tree
from ssmscope.states import States, alone, gathered, joined
from ssmscope.trace import LayerState

TRIED = 5, 9, 12
"""How long the rows are with which it is tried whether a model can be run so; all but one in two pieces."""
KINDS = 13
"""How many tokens are tried: each stands at several places."""
BAND = 8
"""To start a band's operations takes a CPU as long as so many tokens."""
PADDING = 64
"""How many tokens of padding a band has at most: they stand in no product, but where a layer looks back."""
TOGETHER = 3
"""How many times as many tokens are run together as in a batch: the more, the fewer bands."""
PADDED = 0.2
"""What a token of padding costs, in tokens."""
STATE = 0.5
"""What it costs to continue from a state."""
FINER = 0.125, 0.25, *FEWER
"""As `FEWER`, of runs in which a fork makes products no smaller."""
ALL = 2**62


class Band(NamedTuple):
    """Pieces that a layer runs side by side, from where it has made one vector of each token until it has one again.

    Attributes:
        pieces: their numbers.
        tokens: where theirs begin and end among all tokens of the run, piece after piece.
        shape: (pieces, length), padded.
        padded: which of these tokens stands at each place, and at padding any; None where nothing is padded.
        real: the places that are no padding.
        mask: True there, (pieces, length), where states are kept; elsewhere padding changes nothing that is read.
        above: from which of the states that were kept before each piece continues; None at the beginning of rows.
        keep: whether others continue from their ends.
    """

    pieces: Int[np.ndarray, " pieces"]
    tokens: slice
    shape: tuple[int, int]
    padded: Tensor | None
    real: Tensor | None
    mask: Tensor | None
    above: Tensor | None
    keep: bool

    def rows(self, t: Tensor) -> Tensor:
        """The band's part of (1, tokens, width) as (pieces, length, width)."""
        own = t[0, self.tokens]
        return (own if self.padded is None else own.index_select(0, self.padded)).view(*self.shape, -1)

    def flat(self, t: Tensor) -> Tensor:
        """(pieces, length, width) as the band's part, (tokens, width)."""
        return t.flatten(0, 1) if self.real is None else t.flatten(0, 1).index_select(0, self.real)


def bands(rows: Rows, pieces: Pieces) -> Iterator[tuple[Band, np.ndarray]]:
    """The bands of a run in the order in which layers run them, and the ids of their tokens."""
    lengths = pieces.stop - pieces.start
    places = np.zeros(len(pieces.row), dtype=np.int64)  # of pieces among the states that are kept
    held = at = 0
    for group in groups(pieces):
        for part in by_length(lengths[group].tolist(), ALL, padding=PADDING):
            chosen = group[part]
            ids, mask = rows.padded(pieces.row[chosen], pieces.start[chosen], pieces.stop[chosen])
            number, keep = int(mask.sum()), bool(pieces.kept[chosen[0]])
            padded = real = None
            if number < mask.size:
                real = torch.from_numpy(np.flatnonzero(mask))
                padded = torch.from_numpy(np.maximum(mask.ravel().cumsum() - 1, 0))
            above = pieces.above[chosen]
            yield (
                Band(
                    pieces=chosen,
                    tokens=slice(at, at + number),
                    shape=mask.shape,
                    padded=padded,
                    real=real,
                    mask=torch.from_numpy(mask) if keep and real is not None else None,
                    above=torch.from_numpy(places[above]) if above[0] >= 0 else None,
                    keep=keep,
                ),
                ids[mask],
            )
            at += number
            if keep:
                places[chosen] = held + np.arange(len(chosen))
                held += len(chosen)


class NotPacked(Exception):
    """A layer is not a first product, what looks back, and a last product."""


class _Run:
    """What the layers of one run share."""

    def __init__(self, run: list[Band], tree: Tree, ids: Int[np.ndarray, " tokens"], read: Tensor) -> None:
        self.bands, self.tree = run, tree
        chosen, alike = np.unique(ids, return_index=True, return_inverse=True)[1:]
        self.chosen = torch.from_numpy(chosen)  # one token of each kind
        self.alike = torch.from_numpy(alike)  # the kind of each token
        self.read = read  # tokens after which logits are read
        self.entering: Tensor | None = None  # of a band, while it runs
        self.leaving: list[Tensor] = []

    def enter(self, first: bool, part: Any, below: Any, u: Tensor) -> Tensor:
        """In place of a mixer's first product; that of the first one knows nothing but which token it is."""
        if self.entering is not None:
            return self.entering
        if not first:
            return run_linear(part, below, u)
        return run_linear(part, below, u.index_select(1, self.chosen)).index_select(1, self.alike)

    def leave(self, last: bool, part: Any, below: Any, y: Tensor) -> Tensor:
        """In place of its last; that of the last one is 0 where it is not read."""
        if self.entering is None and not last:
            return run_linear(part, below, y)
        if self.entering is None:
            found = run_linear(part, below, y.index_select(1, self.read))
            return found.new_zeros(1, y.shape[1], found.shape[-1]).index_copy_(1, self.read, found)
        self.leaving.append(y)
        return y

    def mixed(self, mixer: Any, u: Tensor, *_: Any) -> Tensor:
        """A mixer's output, (1, tokens, width)."""
        if getattr(mixer.in_proj, "in_features", None) != u.shape[-1]:
            raise NotPacked
        reader = reader_of(mixer)
        together = reader.over_tree(mixer, u, self.tree) if hasattr(reader, "over_tree") else None
        if together is not None:
            return together
        projected = mixer.in_proj(u)
        kept: list[LayerState] = []
        left = []
        for band in self.bands:
            start = None
            if band.above is not None:
                kept = list(joined([(state,) for state in kept]))
                (start,) = gathered(tuple(kept), band.above)
            nothing = u.new_zeros(()).expand(*band.shape, u.shape[-1])
            self.entering, self.leaving = band.rows(projected), []
            try:
                layer = terms_of(mixer, nothing, band.mask, start)
                scans = layer.scan(start)
                found = reader.output(mixer, layer, scans)
            finally:
                self.entering = None
            if len(self.leaving) != 1 or found is not self.leaving[0]:
                raise NotPacked
            left.append(band.flat(found))
            if band.keep:
                kept.append(alone(reader.state_after(mixer, layer, scans)))
        return mixer.out_proj(torch.cat(left).unsqueeze(0))


def tree_of(pieces: Pieces, order: Sequence[Int[np.ndarray, " chosen"]]) -> Tree:
    """The tree of all pieces, in the order in which they stand in a run."""
    chosen = np.concatenate(order)
    place = np.empty_like(chosen)
    place[chosen] = np.arange(len(chosen))
    above = pieces.above[chosen]
    return Tree((pieces.stop - pieces.start)[chosen], np.where(above < 0, -1, place[above]))


def run_packed(model: Model, rows: Rows, pieces: Pieces, read: Read) -> None:
    """Run every piece once, all in one run of the model, and read the logits where a row ends; see `Read`."""
    found, tokens = zip(*bands(rows, pieces))
    backbone, mixers, numbers = model.module.base_model, model.mixers, np.concatenate(tokens)
    ids = torch.from_numpy(numbers).unsqueeze(0)
    ends_of = [pieces.ends[band.pieces] for band in found]
    lengths = [(pieces.stop - pieces.start)[band.pieces] for band in found]
    chosen = np.flatnonzero(np.concatenate(ends_of))
    last = torch.from_numpy((np.concatenate(lengths).cumsum() - 1)[chosen])
    row = pieces.row[np.concatenate([band.pieces for band in found])[chosen]]
    run = _Run(list(found), tree_of(pieces, [band.pieces for band in found]), numbers, last)
    instead = {id(mixer): run.mixed for mixer in mixers}
    products: list[tuple[Any, Handler]] = []
    for mixer in mixers:
        products.append((mixer.in_proj, partial(run.enter, mixer is mixers[0], mixer.in_proj)))
        products.append((mixer.out_proj, partial(run.leave, mixer is mixers[-1], mixer.out_proj)))
    with torch.no_grad(), model.running(), computed_by(instead, {}, {}), taken_over(products):
        hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state[0]
    hidden = hidden.index_select(0, last).unsqueeze(1)
    for start in range(0, len(row), rows_together(model)):
        part = slice(start, start + rows_together(model))
        handed = Handed(hidden[part])
        batch = Batch(ids[0, last[part], None], torch.ones_like(ids[0, last[part], None], dtype=torch.bool), (), ())
        with torch.no_grad(), model.running(), taken_over([(backbone, partial(_handed, handed))]):
            logits = model.forward(batch, last_only=True)
        read(row[part], logits, ())


def run_rows(model: Model, rows: Rows, read: Read, *, tokens_at_once: int) -> None:
    """Run sorted, distinct rows, of which so many tokens would be a batch, and read the logits where they end; see
    `Read`."""
    for first, part in parts(rows, TOGETHER * tokens_at_once):
        pieces = planned(part)
        run_packed(model, part, pieces, lambda ends, *found: read(first + ends, *found))  # noqa: B023


def parts(rows: Rows, tokens_at_once: int) -> Iterator[tuple[int, Rows]]:
    """Neighbours that run together, and the number of the first: about as many tokens each, what they begin with alike
    counted once."""
    new = rows.lengths - rows.shared()
    number = max(1, -(-int(new.sum()) // tokens_at_once))
    bounds = np.searchsorted(new.cumsum(), new.sum() / number * np.arange(number + 1)[1:-1])
    bounds = np.unique([0, *bounds, len(rows)])
    yield from ((first, rows.between(first, last)) for first, last in zip(bounds.tolist(), bounds[1:].tolist()))


def planned(rows: Rows) -> Pieces:
    """Sorted, distinct rows with shared beginnings run once, in the way that costs least: by the tokens in
    products, and by what every band and every continuation costs."""

    def cost(pieces: Pieces) -> float:
        lengths = pieces.stop - pieces.start
        total = pieces.tokens + STATE * float((pieces.above >= 0).sum())
        for group in groups(pieces):
            own = lengths[group].tolist()
            total += sum(
                BAND + PADDED * (len(part) * own[part[-1]] - sum(own[place] for place in part))
                for part in by_length(own, ALL, padding=PADDING)
            )
        return total

    return min((*ways_to_fork(rows, FINER), whole(rows)), key=cost)


def _handed(handed: Handed, below: Any, *args: Any, **kwargs: Any) -> Handed:
    return handed


def plain(model: Model) -> bool:
    """Whether nothing but mixers reads a model's run, which are between products that nobody else has taken over, on a
    CPU: to start a band's operations takes a GPU as long as to start a batch's."""
    module = model.module
    if model.device.type != "cpu" or module.base_model is module or looks_ahead(module) or edits_of(module):
        return False
    ended = all(hasattr(mixer, "in_proj") and hasattr(mixer, "out_proj") for mixer in model.mixers)
    return ended and all(is_own(part, part.forward) and not has_hooks(part) for part in module.modules())


def packs(model: Model) -> bool:
    """Whether `run_packed` gives what whole runs give, as it does where a model is `plain` and nothing but mixers looks
    back: tried with a few rows."""
    if not plain(model):
        return False
    kinds = min(model.vocabulary, KINDS)
    ids = [[(5 * place + place // 7 + 11 * length) % kinds for place in range(length)] for length in TRIED]
    tried = Rows.of(sorted(as_bytes([*ids, *(each[: len(each) // 2] for each in ids[1:])])))
    everything = np.arange(len(tried))
    expected = run_batch(model, *tried.padded(everything, np.zeros_like(everything), tried.lengths)).logits.double()
    found = torch.full_like(expected, torch.nan)

    def read(ends: Int[np.ndarray, " ends"], logits: Tensor, _: States) -> None:
        found[torch.from_numpy(ends)] = logits.double()

    try:
        run_packed(model, tried, next(ways_to_fork(tried, (1,))), read)
    except NotPacked:
        return False
    spread = (expected - expected.mean(-1, keepdim=True)).abs().amax(-1)
    allowed = max(1e-3, 16 * torch.finfo(next(model.module.parameters()).dtype).eps)
    return bool(((found - expected).abs().amax(-1) <= allowed * spread).all())
