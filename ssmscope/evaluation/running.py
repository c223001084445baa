"""Rows through a model in full batches, shared beginnings once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ssmscope.core.attention_layers import AttentionState
from ssmscope.core.batching import by_length
from ssmscope.core.encoding import Batch
from ssmscope.core.mixers import is_bidirectional
from ssmscope.core.model import Model, Run
from ssmscope.core.states import States, gathered, joined, size
from ssmscope.core.trace import LayerState
from ssmscope.evaluation.forking import CONTINUING, Pieces, Rows, ways_to_fork, whole

NUMBERS_AT_ONCE = 2**19
"""How many numbers, tokens times the model's width, are in a batch on a CPU: more fall out of its caches."""
TOKENS_AT_ONCE = 512, 2048
"""The fewest and the most tokens of a batch there."""
ON_A_GPU = 32
"""How many times as many run together there."""
PADDING = {"cpu": (24, 2**24), "cuda": (768, 2**36)}
"""How many tokens of padding a batch has at most, since to read the weights for one more batch takes as long, and what
is added to them: so many weights over those of a layer, as long as it takes to start a layer's operations. On a GPU
that is half a millisecond, in which an H200 multiplies a token by some 2³⁶ weights."""
LOGITS_AT_ONCE = 2**26
"""How many numbers the logits of a batch have: 256 MiB of float32."""
STATES_AT_ONCE = 2**29
"""How many bytes the states have that are held, or that a batch begins with, on a CPU; on a GPU a sixteenth of its
memory."""

TRIED = 8, 32
"""How long the rows are, at least and at most, with which it is tried whether a model continues from its states."""

Read = Callable[[Int[np.ndarray, " ends"], Tensor, States], None]
"""Called with the numbers of rows, their logits (rows, …) and, where they are asked for, the states after them."""


def tokens_together(model: Model) -> int:
    """How many tokens suit the model's device at a time."""
    fewest, most = TOKENS_AT_ONCE
    return min(max(fewest, NUMBERS_AT_ONCE // model.width), most) * (1 if model.device.type == "cpu" else ON_A_GPU)


def padding_together(model: Model) -> int:
    """How much padding costs the model's device no more than one more batch."""
    weights = sum(weight.numel() for mixer in model.mixers for weight in mixer.parameters())
    reading, starting = PADDING["cpu" if model.device.type == "cpu" else "cuda"]
    return reading + starting * len(model.mixers) // max(1, weights)


def states_together(model: Model, size: int) -> int:
    """How many rows' states may be held at a time, of so many bytes each."""
    if model.device.type != "cuda":
        return max(1, STATES_AT_ONCE // max(1, size))
    return max(1, torch.cuda.get_device_properties(model.device).total_memory // 16 // max(1, size))


def planned(model: Model, rows: Rows, tokens_at_once: int, states_at_once: int) -> Pieces:
    """Sorted, distinct rows with shared beginnings run once, in the way that costs the model's device least: by the
    tokens that are run, padding included, and by what every batch costs. For the numbers see `run_pieces`."""
    batch, held = padding_together(model), rows_together(model, states_at_once)

    def cost(pieces: Pieces) -> int:
        lengths = pieces.stop - pieces.start
        total = CONTINUING * int((pieces.above >= 0).sum())
        together = groups(pieces)
        for group in together:
            own = lengths[group].tolist()
            parts = by_length(own, tokens_at_once, most=None if group is together[-2] else held, padding=batch)
            total += sum(batch + len(part) * own[part[-1]] for part in parts)
        return total

    return min((*ways_to_fork(rows), whole(rows)), key=cost)


def groups(pieces: Pieces) -> list[Int[np.ndarray, " chosen"]]:
    """The pieces that run together, by length: those that others continue from, level after level, then the other
    beginnings of rows, and the others."""
    ascending = np.argsort(pieces.stop - pieces.start, kind="stable")
    kept, first, level = (what[ascending] for what in (pieces.kept, pieces.above < 0, pieces.level))
    levels = [ascending[kept & (level == number)] for number in range(int(level[kept].max(initial=-1)) + 1)]
    return [*levels, ascending[~kept & first], ascending[~kept & ~first]]


def run_pieces(
    model: Model,
    rows: Rows,
    pieces: Pieces,
    read: Read,
    *,
    tokens_at_once: int,
    states_at_once: int,
    states: bool = False,
) -> None:
    """Run every piece once, and read the logits where a row ends.

    Pieces from whose states others start are run level after level, then the others in full batches.

    Args:
        read: called with the rows that end in a batch; see `Read`.
        tokens_at_once: how many tokens are run together, padding included.
        states_at_once: how many rows are run together where they begin with states, or these are kept.
        states: whether `read` is given the states.
    """
    padding = padding_together(model)
    places = np.zeros(len(pieces.row), dtype=np.int64)  # of pieces among the states that others start from

    def run(chosen: Int[np.ndarray, " chosen"], starts: States, keep: bool) -> States:
        ended: list[States] = []
        most = rows_together(model, states_at_once if starts or keep else None)
        lengths = (pieces.stop - pieces.start)[chosen].tolist()
        for part in by_length(lengths, tokens_at_once, most=most, padding=padding):
            batch = chosen[part]
            ids, mask = rows.padded(pieces.row[batch], pieces.start[batch], pieces.stop[batch])
            start = gathered(starts, _index(places[pieces.above[batch]], model)) if starts else None
            logits, after = run_batch(model, ids, mask, start, keep=keep)
            ends = np.flatnonzero(pieces.ends[batch])
            if len(ends) == len(batch):
                read(pieces.row[batch], logits, after)
            elif len(ends):
                at = _index(ends, model)
                read(pieces.row[batch[ends]], logits[at], gathered(after, at))
            ended.append(after)
        return joined(ended)

    *levels, first, others = groups(pieces)
    left: list[States] = []
    held = 0
    for chosen in levels:
        left.append(run(chosen, left[-1] if left else (), True))
        places[chosen] = np.arange(len(chosen))
    for chosen in levels:
        places[chosen] += held
        held += len(chosen)
    everything = joined(left)
    left.clear()
    run(first, (), states)
    run(others, everything, states)


def rows_together(model: Model, states_at_once: int | None = None) -> int:
    """How many rows' logits are held at a time, and states where so many of these may be."""
    numbers = len(model.labels) if model.labels is not None else model.vocabulary
    most = max(1, LOGITS_AT_ONCE // numbers)
    return most if states_at_once is None else min(most, states_at_once)


def run_batch(
    model: Model,
    ids: Int[np.ndarray, "rows length"],
    mask: np.ndarray,
    states: States | None = None,
    *,
    keep: bool = False,
) -> Run:
    """The logits at each row's last token, (rows, …), and with `keep` the states after it.

    The layers know of padding where states are kept, and where they read what comes after a token. Elsewhere padding
    changes nothing that is read: it stands behind it.
    """
    device = model.device
    batch = Batch(torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device), (), ())
    real = batch.mask if keep or is_bidirectional(model.module) else torch.ones_like(batch.mask)
    after: list[LayerState] = []
    with torch.no_grad(), model.running(mask=real, states=states, keep=after if keep else None):
        logits = model.forward(batch, last_only=True)
    return Run(logits, tuple(after))


def continues(model: Model, rows: Rows) -> tuple[bool, int]:
    """Whether a run in two parts is the whole run, as it is where nothing looks back that keeps no state, and how many
    bytes a row's states have: with kept keys and values, the longest's.

    Tried with a few of the rows: long ones are cut, short ones repeated.
    """
    if not model.continues:
        return False, 0
    ascending = np.argsort(rows.lengths, kind="stable")
    chosen = np.unique(ascending[np.linspace(0, len(rows) - 1, 3).astype(np.int64)])
    parts = [rows.ids[rows.starts[row] : rows.starts[row + 1]] for row in chosen]
    parts = [np.resize(ids, min(max(len(ids), TRIED[0]), TRIED[1])) for ids in parts]
    tried = Rows(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))
    everything, none = np.arange(len(tried)), np.zeros(len(tried), dtype=np.int64)
    half = tried.lengths // 2
    expected = run_batch(model, *tried.padded(everything, none, tried.lengths)).logits
    first = run_batch(model, *tried.padded(everything, none, half), keep=True)
    found = run_batch(model, *tried.padded(everything, half, tried.lengths), first.states).logits
    expected, found = expected.double(), found.double()
    spread = (expected - expected.mean(-1, keepdim=True)).abs().amax(-1)
    allowed = max(1e-3, 16 * torch.finfo(next(model.module.parameters()).dtype).eps)
    grow = [state for state in first.states if isinstance(state, AttentionState)]
    each = sum(size((state,)) // state.places.numel() for state in grow) * int(rows.lengths.max())
    each += size(tuple(state for state in first.states if not isinstance(state, AttentionState))) // len(tried)
    return bool(((found - expected).abs().amax(-1) <= allowed * spread).all()), each


def _index(places: Int[np.ndarray, " rows"], model: Model) -> Tensor:
    return torch.from_numpy(places).to(model.device)
